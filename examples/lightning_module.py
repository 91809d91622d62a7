"""A module of Lightning with our layers in it.

    python examples/lightning_module.py

It needs `lightning` or `pytorch_lightning`. The graphs are generated.
"""

import argparse
from importlib.util import find_spec

import torch
import torch.nn.functional as F
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.loader import DataLoader
from torch_geometric.nn import GATv2Conv

import pyg_dfgnn
from pyg_dfgnn.nn import global_mean_pool

if find_spec("lightning"):
    import lightning.pytorch as pl
elif find_spec("pytorch_lightning"):
    import pytorch_lightning as pl
else:
    print("skipped: needs lightning: pip install lightning")
    raise SystemExit


class Model(pl.LightningModule):
    def __init__(self, in_channels: int, classes: int) -> None:
        super().__init__()
        self.conv = GATv2Conv(in_channels, 8, heads=4)
        self.lin = torch.nn.Linear(32, classes)
        # In place, before the optimizer is made; checkpoints and their names stay PyG's.
        pyg_dfgnn.accelerate(self)

    def forward(self, batch: Data) -> Tensor:
        x = self.conv(batch.x, batch.edge_index).relu()
        return self.lin(global_mean_pool(x, batch.batch, batch.num_graphs))

    def training_step(self, batch: Data, batch_idx: int) -> Tensor:
        loss = F.cross_entropy(self(batch), batch.y)
        self.log("loss", loss, on_epoch=True, on_step=False, batch_size=batch.num_graphs)
        return loss

    def on_train_epoch_end(self) -> None:
        print(f"epoch {self.current_epoch + 1}: loss {self.trainer.callback_metrics['loss']:.3f}")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.01)


def generated(count: int) -> list[Data]:
    """Return small and large graphs, the classes, whose features differ somewhat."""
    sizes = torch.randint(10, 40, (count,)).tolist()
    labels = [int(n > 24) for n in sizes]
    edges = [torch.randint(n, (2, 4 * n)) for n in sizes]
    return [Data(torch.randn(n, 16) + y, e, y=torch.tensor([y])) for n, y, e in zip(sizes, labels, edges)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=5, help="default: %(default)s")
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"), help="default: %(default)s")
    args = parser.parse_args()
    torch.manual_seed(0)
    model = Model(16, 2)
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = pl.Trainer(max_epochs=args.epochs, accelerator=args.device, devices=1, **quiet)
    trainer.fit(model, DataLoader(generated(128), batch_size=32, shuffle=True))
    print(pyg_dfgnn.report(model))


if __name__ == "__main__":
    main()

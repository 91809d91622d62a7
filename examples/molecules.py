"""Solubility of molecules, with training steps that run as one launch each on a GPU.

    python examples/molecules.py

`molecules/solubility.npz` is searched in `data`; without it, or with `--generated`, molecules are generated. On a CPU
the steps run one operation after the other, with equal numbers.
"""

import argparse

import torch
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.loader import DataLoader
from torch_geometric.nn import MLP, GINEConv

import pyg_dfgnn
from pyg_dfgnn.datasets import solubility
from pyg_dfgnn.nn import global_mean_pool


class Model(torch.nn.Module):
    def __init__(self, in_channels: int, edge_dim: int, channels: int = 64, layers: int = 3) -> None:
        super().__init__()
        self.lin = torch.nn.Linear(in_channels, channels)
        nets = [MLP([channels, channels, channels], norm=None) for _ in range(layers)]
        self.convs = torch.nn.ModuleList(GINEConv(net, edge_dim=edge_dim) for net in nets)
        self.out = torch.nn.Linear(channels, 1)

    def forward(self, batch: Data) -> Tensor:
        x = self.lin(batch.x)
        for conv in self.convs:
            x = x + conv(x, batch.edge_index, batch.edge_attr).relu()
        # The number of graphs, without which the host would wait for the GPU.
        return self.out(global_mean_pool(x, batch.batch, batch.num_graphs)).squeeze(1)


def loss(out: Tensor, batch: Data) -> Tensor:
    """Return the mean absolute error; the molecules that fill up a batch have the weight 0."""
    return ((out - batch.y).abs() * batch.weight).sum() / batch.weight.sum()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=20, help="default: %(default)s")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="default: %(default)s")
    parser.add_argument("--generated", action="store_true", help="leave out real data")
    args = parser.parse_args()
    torch.manual_seed(0)
    task = solubility(source="generated" if args.generated else "auto")
    for graph in (graph for graphs in task.splits.values() for graph in graphs):
        graph.weight = torch.ones(1)
    train = DataLoader(task.splits["train"], batch_size=64, shuffle=True)

    model = Model(task.num_features, task.num_edge_features).to(args.device)
    pyg_dfgnn.accelerate(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    step = pyg_dfgnn.capture_step(model, loss, optimizer, train, forward=lambda model, batch: model(batch))
    for epoch in range(1, args.epochs + 1):
        model.train()
        losses = torch.stack([step(batch) for batch in train])
        print(f"epoch {epoch}: loss {losses.mean():.3f}")
    model.eval()
    with torch.no_grad():
        batches = [batch.to(args.device) for batch in DataLoader(task.splits["test"], batch_size=256)]
        errors = torch.cat([(model(batch) - batch.y).abs() for batch in batches])
    print(f"test error {errors.mean() * task.scale:.3f} {task.unit}")
    print(pyg_dfgnn.report(model))


if __name__ == "__main__":
    main()

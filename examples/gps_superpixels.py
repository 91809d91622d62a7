"""GraphGPS on superpixels of MNIST: message passing beside attention among all nodes of a graph.

    python examples/gps_superpixels.py

The images, or the published graphs, are searched in `data`, then downloaded; with `--generated`, graphs of the same
sizes are generated instead.
"""

import argparse

import torch
import torch.nn.functional as F
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.loader import DataLoader
from torch_geometric.nn import MLP, GINEConv, GPSConv

import pyg_dfgnn
from pyg_dfgnn.datasets import Task, image_superpixels, image_superpixels_like
from pyg_dfgnn.nn import global_mean_pool


class GPS(torch.nn.Module):
    def __init__(self, in_channels: int, classes: int, channels: int = 32, layers: int = 3) -> None:
        super().__init__()
        self.lin = torch.nn.Linear(in_channels, channels)
        nets = [MLP([channels, channels, channels], norm=None) for _ in range(layers)]
        convs = [GPSConv(channels, GINEConv(net, edge_dim=1), heads=4) for net in nets]
        self.convs = torch.nn.ModuleList(convs)
        self.out = MLP([channels, channels, classes], norm=None)

    def forward(self, batch: Data) -> Tensor:
        x = self.lin(batch.x)
        for conv in self.convs:
            x = conv(x, batch.edge_index, batch.batch, edge_attr=batch.edge_attr)
        return self.out(global_mean_pool(x, batch.batch, batch.num_graphs))


def generated(count: int) -> Task:
    return image_superpixels_like("MNIST", 8 * count // 10, count // 10, count // 10, cache=None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=20, help="default: %(default)s")
    parser.add_argument("--graphs", type=int, default=1000, help="default: %(default)s")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="default: %(default)s")
    parser.add_argument("--generated", action="store_true", help="leave out real data")
    args = parser.parse_args()
    torch.manual_seed(0)
    try:
        task = generated(args.graphs) if args.generated else image_superpixels("MNIST", num_graphs=args.graphs)
    except (FileNotFoundError, ModuleNotFoundError):
        print("superpixels were neither found nor downloaded, or scikit-image is missing: generated graphs stand in")
        task = generated(args.graphs)

    model = GPS(task.num_features, task.num_classes).to(args.device)
    # The local layers become drop-ins; the attention among all nodes of a graph is PyTorch's.
    pyg_dfgnn.accelerate(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for epoch in range(1, args.epochs + 1):
        model.train()
        losses = []
        for batch in DataLoader(task.splits["train"], batch_size=32, shuffle=True):
            batch = batch.to(args.device)
            optimizer.zero_grad()
            loss = F.cross_entropy(model(batch), batch.y)
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        print(f"epoch {epoch}: loss {torch.stack(losses).mean():.3f}")
    model.eval()
    with torch.no_grad():
        batches = [batch.to(args.device) for batch in DataLoader(task.splits["test"], batch_size=128)]
        is_right = torch.cat([model(batch).argmax(dim=1) == batch.y for batch in batches])
    print(f"test accuracy {is_right.float().mean():.1%}")
    print(pyg_dfgnn.report(model))


if __name__ == "__main__":
    main()

"""A layer of one's own: its messages are compiled, with no change to the class.

    python examples/own_layer.py

The graph is generated. At the end the script says whether kernels would run the layer on a GPU.
"""

import argparse

import torch
import torch.nn.functional as F
from torch import Tensor
from torch_geometric.nn import MessagePassing
from torch_geometric.utils import softmax, stochastic_blockmodel_graph

import pyg_dfgnn


class DistanceAttention(MessagePassing):
    """Attention that falls with the distance of two nodes in a learnt space, on edges with a weight."""

    def __init__(self, in_channels: int, channels: int) -> None:
        super().__init__(aggr="add")
        self.place = torch.nn.Linear(in_channels, channels, bias=False)
        self.value = torch.nn.Linear(in_channels, channels)

    def forward(self, x: Tensor, edge_index: Tensor, edge_weight: Tensor) -> Tensor:
        return self.propagate(edge_index, place=self.place(x), value=self.value(x), edge_weight=edge_weight)

    def message(
        self, place_i: Tensor, place_j: Tensor, value_j: Tensor, edge_weight: Tensor, index: Tensor, size_i: int
    ) -> Tensor:
        score = -(place_i - place_j).square().sum(dim=-1)
        weight = edge_weight * softmax(score, index, num_nodes=size_i)
        return value_j * weight.view(-1, 1)


class Model(torch.nn.Module):
    def __init__(self, in_channels: int, channels: int, classes: int) -> None:
        super().__init__()
        self.conv1 = DistanceAttention(in_channels, channels)
        self.conv2 = DistanceAttention(channels, classes)

    def forward(self, x: Tensor, edge_index: Tensor, edge_weight: Tensor) -> Tensor:
        x = self.conv1(x, edge_index, edge_weight).relu()
        return self.conv2(x, edge_index, edge_weight)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=30, help="default: %(default)s")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="default: %(default)s")
    args = parser.parse_args()
    torch.manual_seed(0)
    classes, nodes = 4, 400
    y = torch.arange(classes).repeat_interleave(nodes // classes).to(args.device)
    likely = torch.full((classes, classes), 0.01).fill_diagonal_(0.1)
    edge_index = stochastic_blockmodel_graph([nodes // classes] * classes, likely).to(args.device)
    edge_weight = torch.rand(edge_index.size(1), device=args.device)
    # A noisy hint of the class, which neighbours make clear.
    x = F.one_hot(y, classes) + torch.randn(nodes, classes, device=args.device)
    is_seen = torch.rand(nodes, device=args.device) < 0.3

    model = Model(classes, 16, classes).to(args.device)
    pyg_dfgnn.accelerate(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    for epoch in range(1, args.epochs + 1):
        optimizer.zero_grad()
        out = model(x, edge_index, edge_weight)
        loss = F.cross_entropy(out[is_seen], y[is_seen])
        loss.backward()
        optimizer.step()
        if epoch in (1, args.epochs) or epoch % 10 == 0:
            print(f"epoch {epoch}: loss {loss:.3f}")
    is_right = out.argmax(dim=1) == y
    print(f"test accuracy {is_right[~is_seen].float().mean():.1%}")
    print(pyg_dfgnn.report(model))
    # The whole description lists every step of the kernels, forward and backward.
    plan = pyg_dfgnn.describe_plan(model.conv1, x, edge_index, edge_weight, device="cuda")
    print("on a GPU,", str(plan).splitlines()[0])


if __name__ == "__main__":
    main()

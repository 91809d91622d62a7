"""Networks on the edges of a mesh, as in MeshGraphNet, which learn a step of heat flow.

    python examples/mesh_edge_network.py

The mesh is generated: triangles over points of the unit square.
"""

import argparse

import torch
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.nn import MLP, MessagePassing
from torch_geometric.transforms import Cartesian, Compose, Distance, FaceToEdge
from torch_geometric.utils import scatter

import pyg_dfgnn


class MeshLayer(MessagePassing):
    """New edges from both ends, then new nodes from the sum of their edges."""

    def __init__(self, channels: int) -> None:
        super().__init__(aggr="add")
        self.edge_net = MLP([3 * channels, channels, channels], norm=None)
        self.node_net = MLP([2 * channels, channels, channels], norm=None)

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor) -> tuple[Tensor, Tensor]:
        edge_attr = edge_attr + self.edge_updater(edge_index, x=x, edge_attr=edge_attr)
        total = self.propagate(edge_index, edge_attr=edge_attr)
        return x + self.node_net(torch.cat([x, total], dim=-1)), edge_attr

    def edge_update(self, x_i: Tensor, x_j: Tensor, edge_attr: Tensor) -> Tensor:
        return self.edge_net(torch.cat([x_i, x_j, edge_attr], dim=-1))

    def message(self, edge_attr: Tensor) -> Tensor:
        return edge_attr


class MeshNet(torch.nn.Module):
    def __init__(self, edge_dim: int, channels: int = 32, layers: int = 2) -> None:
        super().__init__()
        self.of_nodes = MLP([1, channels, channels], norm=None)
        self.of_edges = MLP([edge_dim, channels, channels], norm=None)
        self.layers = torch.nn.ModuleList(MeshLayer(channels) for _ in range(layers))
        self.out = MLP([channels, channels, 1], norm=None)

    def forward(self, heat: Tensor, edge_index: Tensor, edge_attr: Tensor) -> Tensor:
        x, edge_attr = self.of_nodes(heat), self.of_edges(edge_attr)
        for layer in self.layers:
            x, edge_attr = layer(x, edge_index, edge_attr)
        return self.out(x)


def mesh(side: int = 16) -> Data:
    """Return a grid of moved points, each square of which is split into two triangles."""
    pos = torch.cartesian_prod(torch.arange(side), torch.arange(side)) + 0.3 * torch.rand(side * side, 2)
    ids = torch.arange(side * side).view(side, side)
    a, b, c, d = (ids[i : i + side - 1, j : j + side - 1].flatten() for i in (0, 1) for j in (0, 1))
    face = torch.stack([torch.cat([a, b]), torch.cat([b, c]), torch.cat([c, d])])
    return Compose([FaceToEdge(), Cartesian(), Distance()])(Data(pos=pos / side, face=face))


def heat_flow(heat: Tensor, data: Data) -> Tensor:
    """Return the mean difference to the neighbours, nearer ones counting more."""
    source, target = data.edge_index
    flow = torch.exp(-data.edge_attr[:, 2:]) * (heat[source] - heat[target])
    return scatter(flow, target, reduce="mean")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=200, help="default: %(default)s")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="default: %(default)s")
    args = parser.parse_args()
    torch.manual_seed(0)
    data = mesh().to(args.device)

    model = MeshNet(data.num_edge_features).to(args.device)
    pyg_dfgnn.accelerate(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    for epoch in range(1, args.epochs + 1):
        heat = torch.randn(data.num_nodes, 1, device=args.device)
        optimizer.zero_grad()
        loss = (model(heat, data.edge_index, data.edge_attr) - heat_flow(heat, data)).square().mean()
        loss.backward()
        optimizer.step()
        if epoch in (1, args.epochs) or epoch % 20 == 0:
            print(f"epoch {epoch}: loss {loss:.4f}")
    print(pyg_dfgnn.report(model))


if __name__ == "__main__":
    main()

"""RGCN on AIFB, people and publications of an institute linked by 90 relations.

    python examples/rgcn_aifb.py

The raw files are searched in `data`, then downloaded; `--generated` takes a generated graph instead.
"""

import argparse

import torch
import torch.nn.functional as F
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.nn import FastRGCNConv

import pyg_dfgnn
from pyg_dfgnn.datasets import entities


class RGCN(torch.nn.Module):
    def __init__(self, num_nodes: int, classes: int, num_relations: int, channels: int = 16) -> None:
        super().__init__()
        # RGCNConv computes the same, relation by relation on a CPU. Nodes have no features: weights have rows for them.
        self.conv1 = FastRGCNConv(num_nodes, channels, num_relations, num_bases=10)
        self.conv2 = FastRGCNConv(channels, classes, num_relations, num_bases=10)

    def forward(self, edge_index: Tensor, edge_type: Tensor) -> Tensor:
        x = self.conv1(None, edge_index, edge_type).relu()
        return self.conv2(x, edge_index, edge_type)


def generated(num_nodes: int = 400, num_edges: int = 4000, num_relations: int = 8, classes: int = 4) -> Data:
    """Return a graph in which most edges out of a node have a relation that tells its class."""
    y = torch.randint(classes, (num_nodes,))
    edge_index = torch.randint(num_nodes, (2, num_edges))
    likely, any_type = y[edge_index[1]], torch.randint(num_relations, (num_edges,))
    edge_type = torch.where(torch.rand(num_edges) < 0.9, likely, any_type)
    is_train = torch.rand(num_nodes) < 0.5
    data = Data(edge_index=edge_index, edge_type=edge_type, num_nodes=num_nodes, nodes=torch.arange(num_nodes), y=y)
    data.train_mask, data.test_mask = is_train, ~is_train
    return data


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=50, help="default: %(default)s")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="default: %(default)s")
    parser.add_argument("--generated", action="store_true", help="leave out real data")
    args = parser.parse_args()
    torch.manual_seed(0)
    try:
        data = generated() if args.generated else entities("AIFB", val_share=0).splits["train"][0]
    except FileNotFoundError:
        print("AIFB was neither found nor downloaded: a generated graph stands in")
        data = generated()
    data = data.to(args.device)

    classes, num_relations = int(data.y.max()) + 1, int(data.edge_type.max()) + 1
    model = RGCN(data.num_nodes, classes, num_relations).to(args.device)
    pyg_dfgnn.accelerate(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=5e-4)
    for epoch in range(1, args.epochs + 1):
        optimizer.zero_grad()
        # Labels belong to some of the nodes.
        out = model(data.edge_index, data.edge_type)[data.nodes]
        loss = F.cross_entropy(out[data.train_mask], data.y[data.train_mask])
        loss.backward()
        optimizer.step()
        if epoch in (1, args.epochs) or epoch % 10 == 0:
            print(f"epoch {epoch}: loss {loss:.3f}")
    is_right = out.argmax(dim=1) == data.y
    print(f"test accuracy {is_right[data.test_mask].float().mean():.1%}")
    print(pyg_dfgnn.report(model))


if __name__ == "__main__":
    main()

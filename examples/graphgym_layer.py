"""Our layers under a name of GraphGym, which configs then choose by `gnn.layer_type`.

    python examples/graphgym_layer.py

GraphGym needs `yacs`. The graph is generated.
"""

import argparse

import torch
import torch.nn.functional as F
from torch import nn
from torch_geometric.data import Data
from torch_geometric.graphgym.config import cfg, set_cfg
from torch_geometric.graphgym.models.gnn import GNN
from torch_geometric.graphgym.models.layer import LayerConfig
from torch_geometric.graphgym.register import register_layer
from torch_geometric.utils import stochastic_blockmodel_graph

import pyg_dfgnn
from pyg_dfgnn.nn import GATConv


@register_layer("dfgnn_gatconv")
class FusedGAT(nn.Module):
    """GraphGym's `gatconv` with our layer."""

    def __init__(self, layer_config: LayerConfig, **kwargs) -> None:
        super().__init__()
        sizes = layer_config.dim_in, layer_config.dim_out
        self.model = GATConv(*sizes, heads=cfg.gnn.att_heads, concat=False, bias=layer_config.has_bias)

    def forward(self, batch: Data) -> Data:
        batch.x = self.model(batch.x, batch.edge_index)
        return batch


def generated(classes: int = 4, nodes_per_class: int = 100) -> Data:
    """Return a graph whose nodes have a noisy hint of their class, which neighbours make clear."""
    likely = torch.full((classes, classes), 0.01).fill_diagonal_(0.1)
    y = torch.arange(classes).repeat_interleave(nodes_per_class)
    edge_index = stochastic_blockmodel_graph([nodes_per_class] * classes, likely)
    return Data(x=F.one_hot(y, classes) + torch.randn(len(y), classes), edge_index=edge_index, y=y)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=30, help="default: %(default)s")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="default: %(default)s")
    args = parser.parse_args()
    if cfg is None:
        print("skipped: GraphGym needs yacs: pip install yacs")
        return
    torch.manual_seed(0)
    # In place of a file of configs, with the same words.
    set_cfg(cfg)
    options = ["gnn.layer_type", "dfgnn_gatconv", "gnn.att_heads", 4, "gnn.layers_mp", 2, "gnn.dim_inner", 32]
    cfg.merge_from_list([*options, "gnn.head", "node", "dataset.task", "node"])

    data = generated().to(args.device)
    is_seen = torch.rand(data.num_nodes, device=args.device) < 0.3
    model = GNN(dim_in=data.num_features, dim_out=int(data.y.max()) + 1).to(args.device)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for epoch in range(1, args.epochs + 1):
        optimizer.zero_grad()
        # GraphGym's layers write into the graph that they are given, and its head selects the nodes of a split.
        batch = Data(data.x, data.edge_index, y=data.y, train_mask=is_seen, split="train")
        out, y = model(batch)
        loss = F.cross_entropy(out, y)
        loss.backward()
        optimizer.step()
        if epoch in (1, args.epochs) or epoch % 10 == 0:
            print(f"epoch {epoch}: loss {loss:.3f}")
    print(pyg_dfgnn.report(model))


if __name__ == "__main__":
    main()

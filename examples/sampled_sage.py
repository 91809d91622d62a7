"""GraphSAGE on sampled neighbours of a graph that may be too large for a GPU.

    python examples/sampled_sage.py

`NeighborLoader` needs pyg-lib or torch_sparse. The graph is generated. Each step has edges of its own, which needs no
change of the loop.
"""

import argparse

import torch
import torch.nn.functional as F
from torch_geometric.data import Data
from torch_geometric.loader import NeighborLoader
from torch_geometric.nn import GraphSAGE
from torch_geometric.typing import WITH_PYG_LIB, WITH_TORCH_SPARSE
from torch_geometric.utils import stochastic_blockmodel_graph

import pyg_dfgnn


def generated(classes: int = 5, nodes_per_class: int = 400) -> Data:
    """Return a graph whose nodes have a noisy hint of their class, which neighbours make clear."""
    likely = torch.full((classes, classes), 0.001).fill_diagonal_(0.02)
    y = torch.arange(classes).repeat_interleave(nodes_per_class)
    data = Data(x=F.one_hot(y, classes) + torch.randn(len(y), classes), y=y)
    data.edge_index = stochastic_blockmodel_graph([nodes_per_class] * classes, likely)
    data.train_mask = torch.rand(len(y)) < 0.3
    return data


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=10, help="default: %(default)s")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="default: %(default)s")
    args = parser.parse_args()
    if not (WITH_PYG_LIB or WITH_TORCH_SPARSE):
        print("skipped: NeighborLoader needs pyg-lib or torch_sparse")
        return
    torch.manual_seed(0)
    data = generated()
    classes = int(data.y.max()) + 1
    sampling = {"num_neighbors": [10, 5], "batch_size": 64}
    train = NeighborLoader(data, input_nodes=data.train_mask, shuffle=True, **sampling)
    test = NeighborLoader(data, input_nodes=~data.train_mask, **sampling)

    model = GraphSAGE(data.num_features, 32, num_layers=2, out_channels=classes).to(args.device)
    pyg_dfgnn.accelerate(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for epoch in range(1, args.epochs + 1):
        model.train()
        losses = []
        for batch in train:
            batch = batch.to(args.device)
            optimizer.zero_grad()
            # The first nodes of a batch are the seeds, whose labels count.
            out = model(batch.x, batch.edge_index)[: batch.batch_size]
            loss = F.cross_entropy(out, batch.y[: batch.batch_size])
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        print(f"epoch {epoch}: loss {torch.stack(losses).mean():.3f}")
    model.eval()
    right = 0
    with torch.no_grad():
        for batch in test:
            batch = batch.to(args.device)
            out = model(batch.x, batch.edge_index)[: batch.batch_size]
            right += int((out.argmax(dim=1) == batch.y[: batch.batch_size]).sum())
    print(f"test accuracy {right / int((~data.train_mask).sum()):.1%}")
    print(pyg_dfgnn.report(model))


if __name__ == "__main__":
    main()

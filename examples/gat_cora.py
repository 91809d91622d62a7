"""GAT on Cora with our layers in place of PyG's.

    python examples/gat_cora.py

The raw files of Cora are searched in `data`, then downloaded; `--generated` takes a generated graph instead.
"""

import argparse

import torch
import torch.nn.functional as F
from torch_geometric.data import Data
from torch_geometric.nn import GAT
from torch_geometric.utils import stochastic_blockmodel_graph

import pyg_dfgnn
from pyg_dfgnn.datasets import planetoid


def generated(classes: int = 4, nodes_per_class: int = 100) -> Data:
    """Return a graph whose nodes have a noisy hint of their class, which neighbours make clear."""
    likely = torch.full((classes, classes), 0.01).fill_diagonal_(0.1)
    y = torch.arange(classes).repeat_interleave(nodes_per_class)
    data = Data(x=F.one_hot(y, classes) + torch.randn(len(y), classes), y=y)
    data.edge_index = stochastic_blockmodel_graph([nodes_per_class] * classes, likely)
    data.train_mask = torch.rand(len(y)) < 0.3
    data.test_mask = ~data.train_mask
    return data


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=200, help="default: %(default)s")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="default: %(default)s")
    parser.add_argument("--generated", action="store_true", help="leave out real data")
    args = parser.parse_args()
    torch.manual_seed(0)
    try:
        data = generated() if args.generated else planetoid("Cora").splits["train"][0]
    except (FileNotFoundError, ModuleNotFoundError):
        print("Cora was neither found nor downloaded, or scipy is missing: a generated graph stands in")
        data = generated()
    data = data.to(args.device)

    # 64 channels in 8 heads, as published.
    options = {"out_channels": int(data.y.max()) + 1, "heads": 8, "dropout": 0.6, "act": "elu"}
    model = GAT(data.num_features, 64, num_layers=2, **options).to(args.device)
    pyg_dfgnn.accelerate(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.005, weight_decay=5e-4)
    for epoch in range(1, args.epochs + 1):
        model.train()
        optimizer.zero_grad()
        # The edges are sorted once, since every step has the same tensor.
        out = model(data.x, data.edge_index)
        loss = F.cross_entropy(out[data.train_mask], data.y[data.train_mask])
        loss.backward()
        optimizer.step()
        if epoch in (1, args.epochs) or epoch % 10 == 0:
            print(f"epoch {epoch}: loss {loss:.3f}")
    model.eval()
    with torch.no_grad():
        is_right = model(data.x, data.edge_index).argmax(dim=1) == data.y
    print(f"test accuracy {is_right[data.test_mask].float().mean():.1%}")
    print(pyg_dfgnn.report(model))


if __name__ == "__main__":
    main()

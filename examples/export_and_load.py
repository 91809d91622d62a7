"""A trained model, exported by `torch.export`, saved, and loaded in a new process for graphs of other sizes.

    python examples/export_and_load.py

The process that loads the file needs `import pyg_dfgnn`, and neither the class of the model nor PyG: exported on a GPU,
the program calls our operators. The graphs are generated.
"""

import argparse
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import torch.nn.functional as F
from torch.export import Dim
from torch_geometric.nn import GraphSAGE

import pyg_dfgnn

LOAD = """
import sys, torch, pyg_dfgnn
program = torch.export.load(sys.argv[1]).module()
inputs, expected = torch.load(sys.argv[2])
out = program(*inputs)
print(f"loaded: graph of {len(out)} nodes, difference {(out - expected).abs().max():.1e}")
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=20, help="default: %(default)s")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="default: %(default)s")
    args = parser.parse_args()
    torch.manual_seed(0)

    def graph(nodes: int) -> tuple[torch.Tensor, torch.Tensor]:
        edge_index = torch.randint(nodes, (2, 8 * nodes), device=args.device)
        return torch.randn(nodes, 16, device=args.device), edge_index

    x, edge_index = graph(200)
    # The label of a node is a function of its neighbours.
    y = (torch.zeros_like(x).index_add_(0, edge_index[1], x[edge_index[0]])[:, 0] > 0).long()
    model = pyg_dfgnn.accelerate(GraphSAGE(16, 32, num_layers=2, out_channels=2).to(args.device))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for epoch in range(1, args.epochs + 1):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x, edge_index), y)
        loss.backward()
        optimizer.step()
        if epoch in (1, args.epochs) or epoch % 5 == 0:
            print(f"epoch {epoch}: loss {loss:.3f}")

    model.eval()
    sizes = {"x": {0: Dim("nodes", min=2)}, "edge_index": {1: Dim("edges", min=2)}}
    program = torch.export.export(model, (x, edge_index), dynamic_shapes=sizes)
    with TemporaryDirectory() as folder, torch.no_grad():
        file, check = Path(folder, "model.pt2"), Path(folder, "check.pt")
        torch.export.save(program, file)
        other = graph(500)
        torch.save((other, model(*other)), check)
        subprocess.run([sys.executable, "-c", LOAD, str(file), str(check)], check=True)


if __name__ == "__main__":
    main()

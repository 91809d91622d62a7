"""One graph on several GPUs, each of which holds a part of its nodes.

    torchrun --nproc_per_node=2 examples/partitioned_graph.py
    torchrun --nproc_per_node=2 examples/partitioned_graph.py --device cpu

Outputs, gradients and losses are those of one process, which `python` starts. The graph is generated.
"""

import argparse

import torch
import torch.nn.functional as F
from torch_geometric.nn import GAT
from torch_geometric.utils import stochastic_blockmodel_graph

import pyg_dfgnn
from pyg_dfgnn.distributed import Group, partition, wrap


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=20, help="default: %(default)s")
    parser.add_argument("--device", default="auto", help="default: %(default)s")
    args = parser.parse_args()
    group = Group.of_environment(args.device)

    # The seed, and with it the graph and the parameters, is the same in each process.
    torch.manual_seed(0)
    classes, nodes = 4, 400
    y = torch.arange(classes).repeat_interleave(nodes // classes)
    likely = torch.full((classes, classes), 0.01).fill_diagonal_(0.1)
    edge_index = stochastic_blockmodel_graph([nodes // classes] * classes, likely)
    # A noisy hint of the class, which neighbours make clear.
    x = F.one_hot(y, classes) + torch.randn(nodes, classes)
    is_seen = torch.rand(nodes) < 0.3

    # The nodes of this process with all edges into them; rows of other processes are fetched by the layers.
    part = partition(edge_index, nodes, group)
    x, y, is_seen = part.local(x), part.local(y), part.local(is_seen)
    model = pyg_dfgnn.accelerate(GAT(classes, 16, 2, out_channels=classes, heads=4).to(group.device))
    parallel = wrap(model, group)
    optimizer = torch.optim.Adam(parallel.parameters(), lr=0.01)
    for epoch in range(1, args.epochs + 1):
        optimizer.zero_grad()
        out = parallel(x, part)
        # The mean over the nodes of all processes, though each has another number of them.
        loss = group.mean(F.cross_entropy(out[is_seen], y[is_seen], reduction="sum"), is_seen.sum())
        loss.backward()
        optimizer.step()
        value = group.average(loss)
        # The end of the line is in the text, so that lines of two processes do not mix.
        print(f"process {group.rank} of {group.size}, epoch {epoch}: loss {value:.6f}\n", end="", flush=True)
    # Every process makes both calls.
    share = part.remote_share()
    right, count = group.sum(torch.stack([(out.argmax(dim=1) == y)[~is_seen].sum(), (~is_seen).sum()]))
    if group.is_main:
        print(f"test accuracy {right / count:.1%}; remote nodes in what a layer reads: {share:.1%}")
        print(pyg_dfgnn.report(model))
    group.close()


if __name__ == "__main__":
    main()

"""Batches of graphs on several GPUs, with PyTorch's DistributedDataParallel.

    torchrun --nproc_per_node=2 examples/ddp.py
    torchrun --nproc_per_node=2 examples/ddp.py --device cpu

Each process trains on its share of the graphs, and prints the loss over all of them. Started by `python`, there is one
process. The graphs are generated.
"""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DistributedSampler
from torch_geometric.data import Data
from torch_geometric.loader import DataLoader
from torch_geometric.nn import TransformerConv

import pyg_dfgnn
from pyg_dfgnn.nn import global_mean_pool


class Model(torch.nn.Module):
    def __init__(self, in_channels: int, classes: int) -> None:
        super().__init__()
        self.conv = TransformerConv(in_channels, 8, heads=4)
        self.lin = torch.nn.Linear(32, classes)

    def forward(self, batch: Data) -> Tensor:
        x = self.conv(batch.x, batch.edge_index).relu()
        return self.lin(global_mean_pool(x, batch.batch, batch.num_graphs))


def generated(count: int) -> list[Data]:
    """Return small and large graphs, the classes, whose features differ somewhat."""
    sizes = torch.randint(10, 40, (count,)).tolist()
    labels = [int(n > 24) for n in sizes]
    edges = [torch.randint(n, (2, 4 * n)) for n in sizes]
    return [Data(torch.randn(n, 16) + y, e, y=torch.tensor([y])) for n, y, e in zip(sizes, labels, edges)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=10, help="default: %(default)s")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="default: %(default)s")
    args = parser.parse_args()
    device = torch.device(args.device)
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(device)
    if "RANK" not in os.environ:
        os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="localhost", MASTER_PORT="0")
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")

    # The seed, and with it graphs and parameters, is the same in each process.
    torch.manual_seed(0)
    graphs = generated(128)
    sampler = DistributedSampler(graphs)
    loader = DataLoader(graphs, batch_size=32 // dist.get_world_size(), sampler=sampler)
    # First our layers, then the wrapper.
    model = pyg_dfgnn.accelerate(Model(16, 2).to(device))
    parallel = DistributedDataParallel(model)
    optimizer = torch.optim.Adam(parallel.parameters(), lr=0.01)
    for epoch in range(1, args.epochs + 1):
        sampler.set_epoch(epoch)
        total = torch.zeros((), device=device)
        for batch in loader:
            batch = batch.to(device)
            optimizer.zero_grad()
            loss = F.cross_entropy(parallel(batch), batch.y)
            loss.backward()
            optimizer.step()
            total += loss.detach() / len(loader) / dist.get_world_size()
        dist.all_reduce(total)
        # The end of the line is in the text, so that lines of two processes do not mix.
        line = f"process {dist.get_rank()} of {dist.get_world_size()}, epoch {epoch}: loss {total:.6f}\n"
        print(line, end="", flush=True)
    if dist.get_rank() == 0:
        print(pyg_dfgnn.report(model))
    # A wrapper that outlives the group may wait forever for threads of the group.
    del parallel
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

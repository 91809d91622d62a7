"""Batches of small graphs whose edges are sorted once per data set, not per batch: python examples/batches.py"""

import torch
from torch_geometric.data import Data
from torch_geometric.loader import DataLoader
from torch_geometric.nn import global_mean_pool

from pyg_dfgnn import Graph
from pyg_dfgnn.nn import TransformerConv
from pyg_dfgnn.transforms import SortEdges


def main(num_graphs: int = 64) -> torch.Tensor:
    """Return one row per graph of the last batch."""
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    sort = SortEdges()  # of a data set: transform=SortEdges(), after all others
    sizes = torch.randint(10, 40, (num_graphs,)).tolist()
    graphs = [sort(Data(x=torch.randn(n, 16), edge_index=torch.randint(n, (2, 4 * n)))) for n in sizes]
    conv = TransformerConv(16, 8, heads=4).to(device)
    for batch in DataLoader(graphs, batch_size=16):
        batch = batch.to(device)
        graph = Graph.of_batch(batch)
        # Layers find the graph by batch.edge_index, too.
        pooled = global_mean_pool(conv(batch.x, graph), batch.batch)
    print(pooled.shape)
    return pooled


if __name__ == "__main__":
    main()

"""Batches of small graphs in training steps that run as one launch each on a GPU: python examples/batches.py"""

import torch
from torch_geometric.data import Data
from torch_geometric.loader import DataLoader

import pyg_dfgnn
from pyg_dfgnn.nn import TransformerConv, global_mean_pool


class Model(torch.nn.Module):
    """Two classes of graphs."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = TransformerConv(16, 8, heads=4)
        self.lin = torch.nn.Linear(32, 2)

    def forward(self, batch: Data) -> torch.Tensor:
        x = self.conv(batch.x, batch.edge_index).relu()
        return self.lin(global_mean_pool(x, batch.batch, batch.num_graphs))


def main(num_graphs: int = 64, epochs: int = 5) -> torch.Tensor:
    """Return the loss of each step."""
    torch.manual_seed(0)
    sizes = torch.randint(10, 40, (num_graphs,)).tolist()
    graphs = [
        Data(x=torch.randn(n, 16), edge_index=torch.randint(n, (2, 4 * n)), y=torch.tensor([n // 25])) for n in sizes
    ]
    loader = DataLoader(graphs, batch_size=16, shuffle=True)
    model = Model().to("cuda" if torch.cuda.is_available() else "cpu")
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

    def loss(out: torch.Tensor, batch: Data) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(out, batch.y)

    step = pyg_dfgnn.capture_step(model, loss, optimizer, loader, forward=lambda model, batch: model(batch))
    losses = torch.stack([step(batch) for _ in range(epochs) for batch in loader])
    print(f"loss {losses[0]:.3f} to {losses[-1]:.3f}")
    return losses


if __name__ == "__main__":
    main()

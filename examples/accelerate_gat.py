"""Train PyG's GAT on a generated graph with our layers in place of PyG's: python examples/accelerate_gat.py"""

import torch
from torch_geometric.nn import GAT
from torch_geometric.utils import stochastic_blockmodel_graph

import pyg_dfgnn


def main(nodes_per_class: int = 100, epochs: int = 30) -> float:
    """Return the accuracy on the nodes that training did not see."""
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    classes = 4
    likely = torch.full((classes, classes), 0.01).fill_diagonal_(0.1)
    edge_index = stochastic_blockmodel_graph([nodes_per_class] * classes, likely).to(device)
    y = torch.arange(classes, device=device).repeat_interleave(nodes_per_class)
    # A noisy hint of the class, which neighbours make clear.
    x = torch.nn.functional.one_hot(y, classes) + torch.randn(len(y), classes, device=device)
    is_seen = torch.rand(len(y), device=device) < 0.3

    model = GAT(classes, 16, num_layers=2, out_channels=classes, heads=4, dropout=0.2).to(device)
    pyg_dfgnn.accelerate(model)
    print(pyg_dfgnn.report(model))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(epochs):
        optimizer.zero_grad()
        # The same tensor edge_index in each step: its edges are sorted once.
        out = model(x, edge_index)
        torch.nn.functional.cross_entropy(out[is_seen], y[is_seen]).backward()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        right = model(x, edge_index).argmax(dim=1) == y
    accuracy = right[~is_seen].float().mean().item()
    print(f"accuracy {accuracy:.1%}")
    return accuracy


if __name__ == "__main__":
    main()

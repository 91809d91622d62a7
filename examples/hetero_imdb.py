"""Genres of films from actors and directors: a model for one node type, made one for all types by PyG's `to_hetero`.

    python examples/hetero_imdb.py

`hetero-small/imdb.npz` is searched in `data`; without it, or with `--generated`, the graph is generated.
"""

import argparse

import torch
import torch.nn.functional as F
from torch import Tensor
from torch_geometric.data import HeteroData
from torch_geometric.nn import SAGEConv, to_hetero
from torch_geometric.transforms import ToUndirected

import pyg_dfgnn
from pyg_dfgnn.datasets import imdb


class SAGE(torch.nn.Module):
    def __init__(self, channels: int, classes: int) -> None:
        super().__init__()
        self.conv1 = SAGEConv((-1, -1), channels)
        self.conv2 = SAGEConv((-1, -1), classes)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.conv2(self.conv1(x, edge_index).relu(), edge_index)


def generated(films: int = 600, people: int = 300, genres: int = 3) -> HeteroData:
    """Return films whose actors and directors have worked for films of the same genre before, mostly."""
    data = HeteroData()
    data.y = torch.randint(genres, (films,))
    data["movie"].x = torch.randn(films, 8)
    for kind, per_film in (("actor", 3), ("director", 1)):
        genre = torch.arange(people) % genres
        data[kind].x = F.one_hot(genre, genres) + torch.randn(people, genres)
        film = torch.arange(films).repeat_interleave(per_film)
        same = torch.randint(people // genres, film.shape) * genres + data.y[film]
        person = torch.where(torch.rand(film.shape) < 0.7, same, torch.randint(people, film.shape))
        data["movie", "has", kind].edge_index = torch.stack([film, person])
    data.train_mask = torch.rand(films) < 0.5
    data.test_mask = ~data.train_mask
    return ToUndirected()(data)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=30, help="default: %(default)s")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="default: %(default)s")
    parser.add_argument("--generated", action="store_true", help="leave out real data")
    args = parser.parse_args()
    torch.manual_seed(0)
    try:
        data = generated() if args.generated else imdb().splits["train"][0]
    except FileNotFoundError:
        print("imdb.npz was not found: a generated graph stands in")
        data = generated()
    data = data.to(args.device)
    film = data.node_types[0]

    # First all types, then our layers: each relation has a conv of its own.
    model = to_hetero(SAGE(32, int(data.y.max()) + 1), data.metadata()).to(args.device)
    pyg_dfgnn.accelerate(model)
    with torch.no_grad():
        # The first call gives the lazy layers their sizes.
        model(data.x_dict, data.edge_index_dict)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=1e-3)
    for epoch in range(1, args.epochs + 1):
        optimizer.zero_grad()
        out = model(data.x_dict, data.edge_index_dict)[film]
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

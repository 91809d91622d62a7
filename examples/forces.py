"""Energies and forces of a SchNet: the loss holds a gradient, so that training differentiates twice.

    python examples/forces.py

Clusters of atoms are generated, with energies and forces of a Morse potential between each two of them.
"""

import argparse

import torch
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.loader import DataLoader
from torch_geometric.nn import SchNet

import pyg_dfgnn

CUTOFF = 4.0


def pairs(pos: Tensor, batch: Tensor) -> tuple[Tensor, Tensor]:
    """Return the pairs of atoms of one molecule within the cutoff, `[2, E]`, and their distances `[E]`."""
    with torch.no_grad():
        is_near = (torch.cdist(pos, pos) < CUTOFF) & (batch[:, None] == batch)
        edge_index = is_near.fill_diagonal_(False).nonzero().t().contiguous()
    return edge_index, (pos[edge_index[0]] - pos[edge_index[1]]).norm(dim=1)


def with_forces(energy: Tensor, pos: Tensor) -> tuple[Tensor, Tensor]:
    """Return the energies `[G, 1]` and the forces `[N, 3]`, their negative gradient in the positions."""
    (slope,) = torch.autograd.grad(energy.sum(), pos, create_graph=True)
    return energy, -slope


def molecule(atoms: int) -> Data:
    corners = torch.cartesian_prod(*[torch.arange(3.0)] * 3)[torch.randperm(27)[:atoms]]
    pos = (1.5 * corners + 0.15 * torch.randn(atoms, 3)).requires_grad_()
    distance = pairs(pos, torch.zeros(atoms))[1]
    energy, force = with_forces(((1 - torch.exp(1.5 - distance)) ** 2).sum().view(1, 1) / 2, pos)
    return Data(z=torch.full((atoms,), 6), pos=pos.detach(), energy=energy.detach(), force=force.detach())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=40, help="default: %(default)s")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="default: %(default)s")
    args = parser.parse_args()
    torch.manual_seed(0)
    graphs = [molecule(atoms) for atoms in torch.randint(6, 14, (64,)).tolist()]
    mean = sum(graph.energy.item() / graph.num_nodes for graph in graphs) / len(graphs)
    for graph in graphs:
        graph.energy -= mean * graph.num_nodes
    loader = DataLoader(graphs, batch_size=16, shuffle=True)

    model = SchNet(32, 32, 2, num_gaussians=20, cutoff=CUTOFF, interaction_graph=pairs).to(args.device)
    pyg_dfgnn.accelerate(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    for epoch in range(1, args.epochs + 1):
        losses = []
        for batch in loader:
            batch = batch.to(args.device)
            pos = batch.pos.requires_grad_()
            energy, force = with_forces(model(batch.z, pos, batch.batch), pos)
            loss = (energy - batch.energy).square().mean() / 10 + (force - batch.force).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        if epoch in (1, args.epochs) or epoch % 5 == 0:
            print(f"epoch {epoch}: loss {torch.stack(losses).mean():.3f}")
    print(pyg_dfgnn.report(model))


if __name__ == "__main__":
    main()

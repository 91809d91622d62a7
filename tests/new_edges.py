"""Edges for tests of graphs that nothing is measured of."""

import torch


def random_edges(num_src, num_dst, num_edges, *, dtype=torch.int64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    ends = [torch.randint(size, (num_edges,), generator=generator) for size in (num_src, num_dst)]
    return torch.stack(ends).to(dtype)

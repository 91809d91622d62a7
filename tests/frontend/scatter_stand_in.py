"""Stand-ins for the functions of `torch_scatter` that are written in C++, where that package is not installed."""

import torch


def _extreme(src, index, dim, dim_size, sign):
    dim %= src.dim()
    index = index.view(-1)
    size = list(src.shape)
    size[dim] = dim_size if dim_size is not None else int(index.max()) + 1 if len(index) else 0
    numbers = sign * src.detach()
    best, place = numbers.new_full(size, torch.finfo(src.dtype).min), index.new_full(size, src.size(dim))
    for k, group in enumerate(index.tolist()):
        row, have, at = numbers.select(dim, k), best.select(dim, group), place.select(dim, group)
        is_better = row > have
        at.copy_(torch.where(is_better, k, at))
        have.copy_(torch.where(is_better, row, have))
    none = src.new_zeros([1 if k == dim else n for k, n in enumerate(src.shape)])
    return torch.cat([src, none], dim).gather(dim, place), place


def scatter_max(src, index, dim=-1, out=None, dim_size=None):
    return _extreme(src, index, dim, dim_size, 1)


def scatter_min(src, index, dim=-1, out=None, dim_size=None):
    return _extreme(src, index, dim, dim_size, -1)


def scatter_softmax(src, index, dim=-1, dim_size=None):
    most = scatter_max(src, index, dim, None, dim_size)[0].index_select(dim, index)
    weight = (src - most).exp()
    total = src.new_zeros(most.shape).index_add(dim, index, weight)
    return weight / total.index_select(dim, index)

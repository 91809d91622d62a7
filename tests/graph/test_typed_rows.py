"""Rows sorted by type in items: each row once, of one type, in order."""

import pytest
import torch

from pyg_dfgnn.graph import Graph, compact_rows
from pyg_dfgnn.graph.derived import Derived
from pyg_dfgnn.graph.typed_rows import TypedRows, one_type, pairs_by_relation, row_items, sorted_by_type


def rows_of(type_ptr, num_rows=None):
    type_ptr = torch.tensor(type_ptr, dtype=torch.int32)
    return TypedRows(
        Derived(torch.device("cpu")), "test", type_ptr, int(type_ptr[-1]) if num_rows is None else num_rows
    )


@pytest.mark.parametrize("every_type", [False, True])
@pytest.mark.parametrize("lengths", [[], [0], [0, 0, 5], [1] * 50, [0, 1, 64, 65, 0, 1000, 128, 0], [7000]], ids=str)
def test_items_cover_every_row_once(lengths, every_type):
    rows = rows_of([0, *torch.tensor(lengths, dtype=torch.int64).cumsum(0).tolist()])
    result = row_items(rows, 64, every_type)
    assert result.items.dtype is torch.int32 and result.items.is_contiguous()
    covered, places, seen = [], [], []
    for number, begin, end, place in result.items.tolist():
        first, last = rows.type_ptr[number : number + 2].tolist()
        assert first <= begin <= end <= last and end - begin <= 64
        assert end > begin or (every_type and first == last)
        assert (place < 0) == (end - begin == last - first)
        covered += range(begin, end)
        places += [(number, place)] if place >= 0 else []
        seen.append(number)
    assert covered == list(range(rows.num_rows))
    assert not every_type or sorted(set(seen)) == list(range(rows.num_types))
    assert [place for _, place in places] == list(range(result.num_places))
    ranges = result.split_ptr.tolist()
    of_places = [
        number for k, number in enumerate(result.split_types.tolist()) for _ in range(ranges[k], ranges[k + 1])
    ]
    assert of_places == [number for number, _ in places]


def test_items_are_built_once():
    rows = one_type(Derived(torch.device("cpu")), 300)
    assert row_items(rows, 128, True) is row_items(rows, 128, True)
    assert row_items(rows, 128, True).items[:, 1].tolist() == [0, 128, 256]


@pytest.mark.parametrize("type_ptr", [[1, 5], [0, 3, 2, 5], [0, 4]], ids=str)
def test_ranges_that_do_not_ascend(type_ptr):
    with pytest.raises(ValueError, match=r"'type_ptr' needs to ascend from 0 to 5 \(got \["):
        row_items(rows_of(type_ptr, 5), 64, False)


def test_compact_rows_by_relation():
    edge_index = torch.tensor([[0, 1, 2, 0], [1, 1, 0, 1]])
    graph = Graph.of(edge_index, 3, edge_type=torch.tensor([2, 0, 2, 2]), num_relations=4)
    rows = pairs_by_relation(graph, "source_relations")
    compact = compact_rows(graph, "source_relations")
    assert rows.num_types == 4 and rows.num_rows == 3 and rows.type_ptr is compact.rowptr
    assert row_items(rows, 64, False).items[:, :3].tolist() == [[0, 0, 1], [2, 1, 3]]


def test_rows_of_any_order():
    holder, type_of = Derived(torch.device("cpu")), torch.tensor([2, 0, 2, 1, 0, 4])
    rows, order = sorted_by_type(holder, "nodes", type_of, 6)
    assert rows.type_ptr.tolist() == [0, 2, 3, 5, 5, 6, 6] and rows.num_rows == 6
    assert order.dtype is torch.int32 and order.tolist() == [1, 4, 3, 0, 2, 5]
    assert sorted_by_type(holder, "nodes", type_of, 6)[1] is order

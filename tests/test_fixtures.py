"""The fixtures do what they promise."""

import types

import pytest
import torch
from torch._dynamo import trace_rules


def allocate(module: str) -> list[torch.Tensor]:
    """Fresh buffers made by a function that lives in `module`."""
    code = (
        "def fresh(torch, like):\n"
        "    return [torch.empty(3), torch.empty_like(like), like.new_empty(2, 2), torch.empty(3, dtype=torch.int32)]"
    )
    namespace = types.ModuleType(module).__dict__
    exec(code, namespace)
    return namespace["fresh"](torch, torch.zeros(4))


def test_fresh_buffers_of_ops_are_nan():
    *floats, integers = allocate("pyg_dfgnn.ops.attention")
    assert all(tensor.isnan().all() for tensor in floats)
    assert integers.dtype == torch.int32


def test_others_keep_their_buffers(monkeypatch):
    filled = []
    monkeypatch.setattr(torch.Tensor, "fill_", lambda self, value: filled.append(value))
    allocate("pyg_dfgnn.graph.graph")
    assert filled == []
    allocate("pyg_dfgnn.ops")
    assert len(filled) == 3


@pytest.mark.parametrize("relist", [True, False])
def test_compiled_code_may_allocate(relist):
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: torch.empty_like(x).copy_(x), fullgraph=True, backend="eager")
    assert compiled(torch.ones(3)).tolist() == [1, 1, 1]
    if relist:  # as after init_process_group: what is listed now must not outlast this test
        trace_rules.clear_lru_cache()
        trace_rules.get_torch_obj_rule_map()

"""Names of torch that may change without notice; beside each, what stands in for it in a release that lacks it.

"None" says what would be lost. The releases that `.ci/run` tries have all of them but two, which builds for CPUs lack.
"""

# ruff: noqa: F401
from collections.abc import Callable
from typing import Any

import torch

# `as_subclass(Tensor)` before the call.
from torch._C import DisableTorchFunction, DisableTorchFunctionSubclass

# None: messages of users' layers would run as they are written.
from torch._dynamo import config as dynamo_config

# `torch.compile(module, backend=...)` in the place of both, which cannot be given settings of Dynamo for one layer.
from torch._dynamo import lookup_backend, optimize

# A module that has `_orig_mod`.
from torch._dynamo.eval_frame import OptimizedModule

# `Exception`, and None in the place of the answer: code that cannot be captured would be tried in each call.
from torch._dynamo.exc import FailOnRecompileLimitHit as RecompileLimitError
from torch._dynamo.exc import ResumePrologueTracingError
from torch._dynamo.types import ConvertFrameReturn

# `type(torch.ops.aten.add.Tensor)`, `type(torch.ops.aten.add)` and `type(torch.cond)`.
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket

# None: kernels would be asked for the addresses of fake tensors.
from torch._subclasses.fake_tensor import FakeTensor

# For the level in `_current_level`: `make_dual`, which raises an error outside of one.
from torch.autograd import forward_ad

# None: torch.compile would take sizes that are equal once for equal ones.
from torch.fx.experimental import _config as shapes_config

# The symbols of a size whose names begin with "u".
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

# `BatchNorm1d` to `BatchNorm3d`, `LazyBatchNorm1d` and so on, and `SyncBatchNorm`.
from torch.nn.modules.batchnorm import _BatchNorm as BatchNormBase
from torch.nn.modules.instancenorm import _InstanceNorm as InstanceNormBase

# The dictionaries of `torch.nn.modules.module` that `register_module_forward_hook` and its kin fill.
from torch.nn.modules.module import _has_any_global_hook as has_any_global_hook

# None: torch's functions under a default device would be taken for intercepted ones.
from torch.utils._device import DeviceContext

# The package `optree`.
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

# None: a checkpoint that ends a second forward early would be taken for an error of the forward.
from torch.utils.checkpoint import _StopRecomputationError as StopRecomputationError

# A classmethod that calls its function within `DisableTorchFunction`.
disabled_torch_function: Any = torch._C._disabled_torch_function_impl
# `torch.jit.is_tracing`, which takes longer.
is_tracing = torch._C._is_tracing
# `torch.utils._python_dispatch._get_current_dispatch_mode`.
dispatch_depth = torch._C._len_torch_dispatch_stack
# The length of `function_modes`, which takes longer.
function_depth = torch._C._len_torch_function_stack
function_modes = torch.overrides._get_current_function_mode_stack
# `torch._C._functorch.peek_interpreter_stack`.
are_transforms_active = torch._C._are_functorch_transforms_active
# An error of `untyped_storage`, which wrappers of transforms have not.
is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor
is_legacy_batched = torch._C._functorch.is_legacy_batchedtensor
# None: gradients of batches would be computed by torch.
add_batch_dim, remove_batch_dim = torch._add_batch_dim, torch._remove_batch_dim
# `torch.is_autocast_enabled` of each type of device.
is_any_autocast_enabled = torch._C._is_any_autocast_enabled
# None: layers that a checkpoint runs again would be counted as new calls.
current_graph_task_id = torch._C._current_graph_task_id
top_saved_tensors_hooks = torch._C._autograd._top_saved_tensors_default_hooks
# `torch.backends.cuda.matmul.fp32_precision`, which takes longer, or `allow_tf32` before torch 2.9.
fp32_precision = torch._C._get_fp32_precision_getter
# `Tensor.reshape`.
unsafe_view = torch.ops.aten._unsafe_view.default
# A loop of `copy_`.
foreach_copy: Callable[..., None] = torch._foreach_copy_
# A kernel that waits.
cuda_sleep = torch.cuda._sleep
# None: memory of a capture that fails would stay taken.
end_allocations = torch._C._cuda_endAllocateToPool
# `torch.cuda.current_device`, which takes longer, also in builds for CPUs.
cuda_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)


def _cuda_stream(index: int) -> int:
    return torch.cuda.current_stream(index).cuda_stream


# The function above, which takes longer, also in builds for CPUs.
cuda_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", _cuda_stream)

"""The constants of a device that the cost models of the schedules share, and what a cost is."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import torch

_NOTHING: Mapping[str, float] = MappingProxyType({})


@dataclass(frozen=True)
class Gpu:
    """A device as the cost models see it.

    Attributes:
        name: As the driver calls it.
        multiprocessors: Number of streaming multiprocessors.
        memory_bytes_per_s: Sustained bandwidth of device memory.
        cache_bytes_per_s: Sustained read bandwidth of the last-level cache.
        cache_bytes: Size of the last-level cache.
        shared_bytes: Shared memory that one block may opt in to.
        instructions_per_s: Warp instructions per second of the whole device.
        tensor_flops: TF32 rate of the tensor cores; 16-bit formats run at twice that.
        launch_s: What one more kernel adds to a pass on the device.
        capability: Compute capability.
    """

    name: str
    multiprocessors: int
    memory_bytes_per_s: float
    cache_bytes_per_s: float
    cache_bytes: int
    shared_bytes: int
    instructions_per_s: float
    tensor_flops: float
    launch_s: float
    capability: tuple[int, int]


H200 = Gpu(
    name="NVIDIA H200",
    multiprocessors=132,
    memory_bytes_per_s=4.26e12,
    cache_bytes_per_s=8.6e12,
    cache_bytes=60 << 20,
    shared_bytes=227 << 10,
    instructions_per_s=132 * 4 * 1.755e9,
    tensor_flops=400e12,
    launch_s=2.5e-6,
    capability=(9, 0),
)
"""Copy as measured; gathers and instructions as the passes of `row_split` show them."""

H200_CLOCK_KHZ, H200_MEMORY_CLOCK_KHZ, H200_BUS_BITS = 1_980_000, 3_201_000, 6144

known: dict[torch.device, Gpu] = {}
"""The devices asked for so far; whoever plans for a device that is not there puts it in first."""


def gpu_of(device: torch.device) -> Gpu:
    """Return the constants of a device: those measured on an H200, scaled by what the driver says of a GPU here."""
    gpu = known.get(device)
    if gpu is None:
        gpu = known[device] = _scaled(device) if device.type == "cuda" and torch.cuda.is_available() else H200
    return gpu


def _scaled(device: torch.device) -> Gpu:
    properties: Any = torch.cuda.get_device_properties(device)
    memory = properties.memory_clock_rate * properties.memory_bus_width / (H200_MEMORY_CLOCK_KHZ * H200_BUS_BITS)
    cores = properties.multi_processor_count * properties.clock_rate / (H200.multiprocessors * H200_CLOCK_KHZ)
    return replace(
        H200,
        name=properties.name,
        multiprocessors=properties.multi_processor_count,
        memory_bytes_per_s=H200.memory_bytes_per_s * memory,
        cache_bytes_per_s=H200.cache_bytes_per_s * cores,
        cache_bytes=properties.L2_cache_size,
        shared_bytes=properties.shared_memory_per_block_optin,
        instructions_per_s=H200.instructions_per_s * cores,
        tensor_flops=H200.tensor_flops * cores,
        capability=(properties.major, properties.minor),
    )


@dataclass(frozen=True)
class Cost:
    """Estimated time of one pass in seconds, by its terms.

    Attributes:
        overlapped: Units that work side by side: the slowest counts.
        added: What comes on top.
        prologue: What other kernels take before the pass, which no timing of the pass covers.
    """

    overlapped: Mapping[str, float]
    added: Mapping[str, float] = field(default_factory=lambda: _NOTHING)
    prologue: Mapping[str, float] = field(default_factory=lambda: _NOTHING)

    @property
    def prologue_s(self) -> float:
        """Seconds of other kernels before the pass."""
        return sum(self.prologue.values())

    @property
    def seconds(self) -> float:
        """The whole pass."""
        return max(self.overlapped.values(), default=0.0) + sum(self.added.values()) + self.prologue_s

    def __str__(self) -> str:
        def listed(terms: Mapping[str, float]) -> list[str]:
            return [f"{name} {1e3 * seconds:.3g} ms" for name, seconds in terms.items()]

        sides = ", ".join(listed(self.overlapped))
        sides = f"max({sides})" if len(self.overlapped) > 1 else sides
        return f"{1e3 * self.seconds:.3g} ms = {' + '.join([sides, *listed(self.added), *listed(self.prologue)])}"

"""The group of processes of a run."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn


def _dropout(module: nn.Module) -> float:
    rate = module.p if isinstance(module, nn.Dropout) else getattr(module, "dropout", 0.0)
    return rate if isinstance(rate, float) else 0.0


@dataclass(frozen=True)
class Group:
    """The processes that train together, seen from one of them; in a group of one, methods return their argument.

    Args:
        rank: Number of this process, from 0.
        size: Number of processes.
        device: Device of this process.

    Example:
        >>> group = Group.of_environment("auto")  # torchrun --nproc_per_node=2 script.py
        >>> graph = partition(edge_index, num_nodes, group)
        >>> model = wrap(model.to(group.device), group)
        >>> logits, y = model(graph.local(x), graph), graph.local(y)
        >>> loss = group.mean(F.cross_entropy(logits, y, reduction="sum"), y.numel())
        >>> loss.backward()  # parameters now hold the gradient of the mean over all nodes of the graph
    """

    rank: int = 0
    size: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    @staticmethod
    def of_environment(device: str | torch.device = "auto") -> Group:
        """Return the group in which torchrun or submitit started this process, else a group of one.

        Args:
            device: "auto", "cpu" or "cuda"; each of several processes takes the GPU of its local rank.

        Raises:
            ValueError: `device` names one GPU for several processes, or there are more processes than GPUs.
        """
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        device = torch.device(device)
        if "WORLD_SIZE" not in os.environ and "SUBMITIT_EXECUTOR" in os.environ:
            from submitit.helpers import TorchDistributedEnvironment

            TorchDistributedEnvironment().export(set_cuda_visible_devices=False)
        size = int(os.environ.get("WORLD_SIZE", 1))
        if size == 1:
            return Group(device=device)
        if device.type == "cuda":
            if device.index is not None:
                raise ValueError(f"'device' needs auto, cpu or cuda with {size} processes (got '{device}')")
            local, gpus = int(os.environ["LOCAL_RANK"]), torch.cuda.device_count()
            if local >= gpus:
                need = f"at most one process per GPU: {gpus} found"
                raise ValueError(f"'nproc_per_node' needs {need} (got {local + 1} or more)")
            device = torch.device("cuda", local)
            torch.cuda.set_device(device)
        # The group lives as long as the process, since torchrun's store cannot serve a second one under the same keys.
        if not dist.is_initialized():
            if device.type == "cuda":
                dist.init_process_group("nccl", device_id=device)
            else:
                dist.init_process_group("gloo")
        return Group(dist.get_rank(), size, device)

    @property
    def is_main(self) -> bool:
        """Whether this process writes files."""
        return self.rank == 0

    def sum(self, tensor: Tensor) -> Tensor:
        """Return the sum of a tensor over all processes, with equal bits on each process and without a gradient."""
        tensor = tensor.detach()
        if self.size > 1:
            tensor = tensor.clone()
            dist.all_reduce(tensor)
        return tensor

    def start_average(self, tensor: Tensor) -> Callable[[], Tensor]:
        """Start :meth:`average` while the device goes on computing, and return a function that ends it."""
        tensor = tensor.detach()
        if self.size == 1:
            return lambda: tensor
        total = tensor.clone()
        work = dist.all_reduce(total, async_op=True)

        def end() -> Tensor:
            work.wait()
            return total / self.size

        return end

    def average(self, tensor: Tensor) -> Tensor:
        """Return the mean of a tensor over all processes, with equal bits on each process and without a gradient."""
        return self.sum(tensor) / self.size if self.size > 1 else tensor.detach()

    def mean(self, total: Tensor, weight: float | Tensor) -> Tensor:
        """Return a process's part of a mean over all processes, `total / average of weight`.

        The average of the parts is the mean, and the average of their gradients, which DistributedDataParallel takes,
        is the gradient of the mean, however unevenly the terms are spread.

        Args:
            total: Sum of the terms of this process.
            weight: Sum of the weights of this process.
        """
        if not isinstance(weight, Tensor):
            weight = total.new_full((), weight)
        return total / self.average(weight.to(total))

    def gather(self, rows: Tensor) -> Tensor:
        """Concatenate the rows `[N_rank, ...]` of all processes by rank to `[N, ...]`, without a gradient."""
        rows = rows.detach()
        if self.size == 1:
            return rows
        counts = self.counts(rows.size(0))
        padded = rows.new_zeros((max(counts), *rows.shape[1:]))
        padded[: rows.size(0)] = rows
        parts = [torch.empty_like(padded) for _ in counts]
        dist.all_gather(parts, padded)
        return torch.cat([part[:count] for part, count in zip(parts, counts)])

    def counts(self, count: int) -> list[int]:
        """Return the numbers of all processes by rank."""
        own = torch.zeros(self.size, dtype=torch.int64, device=self.device)
        own[self.rank] = count
        return self.sum(own).tolist()

    def seed_dropout(self, model: nn.Module, seed: int, epoch: int, *, alike: bool = False) -> None:
        """Seed each process differently for an epoch, or all processes `alike`, if the model has dropout.

        Without dropout the processes stay equally seeded, so that what is drawn once per step, such as the signs of
        encodings, is equal to that of one process. The seed depends on nothing else, so that a resumed run has it too.
        """
        if self.size > 1 and any(_dropout(module) > 0 for module in model.modules()):
            words = [seed, epoch] if alike else [seed, epoch, self.rank]
            state = np.random.SeedSequence(words).generate_state(1)
            torch.manual_seed(int(state[0]))

    def barrier(self) -> None:
        """Wait for all processes."""
        if self.size > 1:
            dist.barrier()

    @contextmanager
    def first_alone(self) -> Iterator[None]:
        """A block that one process of each machine runs before the others, which then find its files."""
        first = int(os.environ.get("LOCAL_RANK", 0)) == 0
        if not first:
            self.barrier()
        yield
        if first:
            self.barrier()

    @staticmethod
    def close() -> None:
        """End the communication of this process, if there is any."""
        if dist.is_initialized():
            # Captured steps that use the communication must be freed first.
            gc.collect()
            dist.destroy_process_group()

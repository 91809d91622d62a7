"""Tasks side by side on the GPUs of a machine, each in a process of its own that sees no other GPU.

A task that ended well leaves a marker and is not run again: the same call goes on where an earlier one stopped.
"""

from __future__ import annotations

import math
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

POLL_S = 0.1
GRACE_S = 10.0
"""What an interrupted task has to write down what it has."""
LEAST_S = 30.0
"""A task that goes on with its rows is not started for less."""
HANGS_S = 600.0
"""A task is given up after so many seconds and ten times what it should take."""
USABLE = 0.95
"""Of a GPU's memory: contexts and what allocators cannot use take the rest."""
_EPSILON = 1e-6


@dataclass(frozen=True)
class Gpu:
    """A GPU, as `CUDA_VISIBLE_DEVICES` names it."""

    name: str
    memory_gb: float


@dataclass(frozen=True)
class Task:
    """A command and what it takes.

    Attributes:
        name: Also of its log, its marker and its folder.
        command: Program and arguments.
        expected_s: Rough seconds, for the order of magnitude of what is left and for what is still worth starting.
        into: The folder of the results that the task's own folder is laid out as; None: it leaves no rows.
        gpus: How many it needs.
        share: Of each of them; what is timed needs a whole one.
        memory_gb: Of each of them; a GPU that has less is given whole.
        cores: That it keeps busy.
        alone: Nothing else may run, because host times count.
        resumes: Started again, it goes on with what its folder holds; otherwise the folder is emptied first.
        after: Names of tasks that must be done before; those that are not in the list are taken as done.
        environment: Variables beside those at hand.
        lacks: Why it cannot run here, '' if it can.
    """

    name: str
    command: tuple[str, ...]
    expected_s: float
    into: str | None = None
    gpus: int = 1
    share: float = 1.0
    memory_gb: float = 0.0
    cores: float = 4.0
    alone: bool = False
    resumes: bool = True
    after: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    lacks: str = ""


@dataclass
class Outcome:
    """What became of tasks, by name.

    Attributes:
        done: Ended well, now or in an earlier call.
        failed: Ended otherwise, or did not end.
        not_run: Cannot run here, with the reason.
        left: Interrupted or not begun, for lack of time.
        interrupted: By the keyboard.
    """

    done: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    not_run: dict[str, str] = field(default_factory=dict)
    left: list[str] = field(default_factory=list)
    interrupted: bool = False


def is_done(task: Task, folder: Path) -> bool:
    """Whether a task has left its marker in the folder."""
    return _marker(task, folder).exists()


def run(tasks: Sequence[Task], folder: Path, gpus: Sequence[Gpu], cores: int, limit_s: float = math.inf) -> Outcome:
    """Run what is not done, in order as far as there is room; a keyboard interrupt ends it in order too.

    Only the main thread can call this, for the sake of interrupts.

    Args:
        tasks: Whose names differ. One that waits for room keeps those behind it from taking it.
        folder: Of markers `<task>.done`, logs `<task>.log` and folders `<task>`.
        gpus: To run on.
        cores: Of the host.
        limit_s: Seconds after which nothing is running any more.

    Returns:
        What became of each task.

    Raises:
        ValueError: Two tasks have the same name.
    """
    names = [task.name for task in tasks]
    if len(set(names)) < len(names):
        raise ValueError(f"'tasks' need names that differ (got {sorted({n for n in names if names.count(n) > 1})})")
    folder.mkdir(parents=True, exist_ok=True)
    return _Schedule(tasks, folder, gpus, cores, limit_s).run()


def _marker(task: Task, folder: Path) -> Path:
    return folder / f"{task.name}.done"


@contextmanager
def _interrupts_after() -> Iterator[None]:
    """Holds interrupts back until a process that was begun is also in the list of those to end."""
    came: list[int] = []
    numbers = signal.SIGINT, signal.SIGTERM, signal.SIGHUP
    # What is ignored stays ignored, here and in the process that is begun.
    listened = [number for number in numbers if signal.getsignal(number) != signal.SIG_IGN]
    before = {number: signal.signal(number, lambda got, _: came.append(got)) for number in listened}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for got in came[:1]:
            signal.raise_signal(got)


class _Running:
    """A task's process."""

    def __init__(self, task: Task, places: list[int], names: Sequence[str], folder: Path) -> None:
        self.task, self.places, self.started, self.log = task, places, time.monotonic(), folder / f"{task.name}.log"
        if not task.resumes:
            shutil.rmtree(folder / task.name, ignore_errors=True)
        environment = {**os.environ, **task.environment, "CUDA_VISIBLE_DEVICES": ",".join(names)}
        with self.log.open("w") as log:
            # A group of its own: the keyboard interrupts us alone, and what is ended is ended with its workers.
            self.process = subprocess.Popen(
                task.command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )

    def took_s(self) -> float:
        return time.monotonic() - self.started

    def signal(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)


class _Schedule:
    def __init__(self, tasks: Sequence[Task], folder: Path, gpus: Sequence[Gpu], cores: int, limit_s: float) -> None:
        self.folder, self.gpus, self.cores, self.limit_s = folder, gpus, cores, limit_s
        self.started, self.total = time.monotonic(), len(tasks)
        self.outcome = Outcome(done=[task.name for task in tasks if is_done(task, folder)])
        self.todo = [task for task in tasks if task.name not in self.outcome.done]
        self.running: list[_Running] = []

    def run(self) -> Outcome:
        self._leave_out()
        self._say(f"{len(self.todo)} of {self.total} tasks to do on {len(self.gpus)} GPUs, about {self._expected()}")
        try:
            while self.todo or self.running:
                self._collect()
                self._leave_out()
                if self._left_s() <= 0:
                    break
                self._start()
                if not self.running:
                    break
                time.sleep(POLL_S)
        except KeyboardInterrupt:
            self.outcome.interrupted = True
            self._say("interrupted")
        finally:
            self.outcome.left += [task.name for task in [*(each.task for each in self.running), *self.todo]]
            self._end(self.running)
        return self.outcome

    def _say(self, text: str) -> None:
        print(f"[{time.monotonic() - self.started:5.0f} s] {text}", flush=True)

    def _left_s(self) -> float:
        return self.limit_s - GRACE_S - (time.monotonic() - self.started)

    def _expected(self) -> str:
        """What is left, as if the GPUs were never idle."""
        alone_s, gpu_s, longest_s = 0.0, 0.0, 0.0
        rest = [(task, task.expected_s) for task in self.todo]
        for task, rest_s in rest + [(r.task, max(0.0, r.task.expected_s - r.took_s())) for r in self.running]:
            alone_s += rest_s if task.alone else 0.0
            gpu_s += 0.0 if task.alone else rest_s * task.gpus * task.share
            longest_s = max(longest_s, rest_s)
        return f"{max(longest_s, alone_s + gpu_s / max(1, len(self.gpus))):.0f} s"

    def _collect(self) -> None:
        """Takes note of what has ended, and ends what seems to hang."""
        for each in list(self.running):
            if each.process.poll() is None:
                allowed_s = HANGS_S + 10 * each.task.expected_s
                if each.took_s() < allowed_s:
                    continue
                reason = f"no end within {allowed_s:.0f} s"
                self._end([each])
            else:
                reason = f"exit code {each.process.returncode}" if each.process.returncode else ""
                # What a crash left behind would keep the memory of the GPU.
                each.signal(signal.SIGKILL)
            self.running.remove(each)
            if reason:
                self.outcome.failed.append(each.task.name)
                last = each.log.read_text(errors="replace").strip().splitlines()[-3:]
                self._say("\n    ".join([f"FAILED {each.task.name}: {reason}; see {each.log}", *last]))
                continue
            _marker(each.task, self.folder).touch()
            self.outcome.done.append(each.task.name)
            rest = f"{len(self.outcome.done)} of {self.total} done, about {self._expected()} left"
            self._say(f"done {each.task.name} after {each.took_s():.0f} s; {rest}")

    def _leave_out(self) -> None:
        for task in list(self.todo):
            reason = task.lacks
            if task.gpus > len(self.gpus):
                reason = f"needs {task.gpus} GPUs"
            missing = [name for name in task.after if name in (*self.outcome.failed, *self.outcome.not_run)]
            if missing:
                reason = f"{' and '.join(missing)} must be done before"
            if reason:
                self.todo.remove(task)
                self.outcome.not_run[task.name] = reason
                self._say(f"not run {task.name}: {reason}")

    def _start(self) -> None:
        """Starts what there is room for."""
        if any(each.task.alone for each in self.running):
            return
        share, cores = [1.0] * len(self.gpus), float(self.cores)
        memory = [USABLE * gpu.memory_gb for gpu in self.gpus]
        for each in self.running:
            cores -= self._take(each.task, each.places, share, memory)
        unfinished = {task.name for task in (*self.todo, *(each.task for each in self.running))}
        for task in list(self.todo):
            least_s = min(task.expected_s, LEAST_S) if task.resumes else task.expected_s
            if unfinished & set(task.after) or self._left_s() < least_s:
                continue
            if task.alone and self.running:
                return
            # While a whole GPU is waited for, those that share one crowd together.
            crowds = task.share < 1 and any(each.share == 1 for each in self.todo)
            order = sorted(range(len(self.gpus)), key=lambda at: (share[at] if crowds else -share[at], at))
            fits = [at for at in order if share[at] >= task.share - _EPSILON]
            fits = [at for at in fits if memory[at] >= self._memory_gb(task, at) - _EPSILON][: task.gpus]
            starts = len(fits) == task.gpus and cores >= min(task.cores, self.cores) - _EPSILON
            places = sorted(fits if starts else order[: task.gpus])
            # Also where it waits, so that small tasks behind it do not keep it waiting for ever.
            cores -= self._take(task, places, share, memory)
            if starts:
                self.todo.remove(task)
                names = [self.gpus[at].name for at in places]
                with _interrupts_after():
                    self.running.append(_Running(task, places, names, self.folder))
                where = f" on GPU {','.join(names)}" if names else ""
                self._say(f"start {task.name}{where}, about {task.expected_s:.0f} s")
                if task.alone:
                    return

    def _memory_gb(self, task: Task, place: int) -> float:
        return min(task.memory_gb, USABLE * self.gpus[place].memory_gb)

    def _take(self, task: Task, places: Iterable[int], share: list[float], memory: list[float]) -> float:
        """Takes a task's part of its GPUs; returns its cores."""
        for at in places:
            share[at] -= task.share
            memory[at] -= self._memory_gb(task, at)
        return min(task.cores, self.cores)

    def _end(self, running: Sequence[_Running]) -> None:
        """Interrupts, waits, and kills what is left, with processes that have left their group."""
        families = [_descendants(each.process.pid) for each in running]
        until = time.monotonic() + GRACE_S
        try:
            for each in running:
                self._say(f"interrupt {each.task.name} after {each.took_s():.0f} s")
                each.signal(signal.SIGINT)
            while any(each.process.poll() is None for each in running) and time.monotonic() < until:
                time.sleep(POLL_S)
        finally:
            for each, family in zip(running, families):
                family |= _descendants(each.process.pid)
                each.signal(signal.SIGKILL)
                each.process.wait()
                for pid, born in family.items():
                    # A number may have gone to another process since.
                    if _stat(pid)[1:] == (born,):
                        with suppress(ProcessLookupError):
                            os.kill(pid, signal.SIGKILL)


def _stat(pid: int) -> tuple[int, ...]:
    """Parent and time of birth of a process; empty where there is none, or no such list as Linux has."""
    try:
        words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ()
    return int(words[1]), int(words[19])


def _descendants(pid: int) -> dict[int, int]:
    """The processes that a process has started, themselves or by others, with their times of birth."""
    stats = {int(path.name): _stat(int(path.name)) for path in Path("/proc").glob("[0-9]*")}
    found: dict[int, int] = {}
    todo = [pid]
    while todo:
        parent = todo.pop()
        children = {child: stat[1] for child, stat in stats.items() if stat and stat[0] == parent}
        found |= children
        todo += children
    return found

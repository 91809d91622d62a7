"""A process of its own that compiles kernels in a broken environment: by a GPU, or by NVRTC and CuPy's cache alone."""

import logging
import os
import resource
import signal
import sys
import threading
from contextlib import ExitStack, nullcontext
from types import SimpleNamespace
from unittest.mock import patch

import torch

from pyg_dfgnn.command import doctor
from pyg_dfgnn.command.layers import LAYERS
from pyg_dfgnn.dispatch.attention.row_split import node_constants
from pyg_dfgnn.runtime import compiler
from pyg_dfgnn.statements.spec import Spec
from tests.processes import CONTEXT

SPEC = Spec("attention/norm.cu", tuple(node_constants(3, 8, torch.float32).items()))
# NVRTC takes about as long for `SPEC`, or longer.
SOON_S = 0.03


class Loaded:
    """Stands for a module on a device, which needs a driver."""

    def load(self, binary):
        self.binary = bytes(binary)

    def _set_mapping(self, mapping):
        pass


class Module:
    """Stands for `cupy.RawModule`: CuPy's own compilation and cache for an H200."""

    def __init__(self, code, options, backend):
        self.arguments = code, options, backend

    def compile(self):
        from cupy.cuda.compiler import _compile_module_with_cache

        code, options, backend = self.arguments
        assert _compile_module_with_cache(code, options, arch="90", backend=backend).binary[:4] == b"\x7fELF"


def compile_and_run():
    """Compile and run a layer where there is a GPU, and compile a kernel where there is none."""
    if torch.cuda.is_available():
        compiler.module.cache_clear()
        assert doctor.error_of(LAYERS["aggregation"], torch.device("cuda")) < 1e-4
        return
    cupy = compiler.import_cupy()
    with ExitStack() as stack:
        enter = stack.enter_context
        enter(patch.object(cupy, "RawModule", Module))
        enter(patch.object(cupy.cuda, "Device", lambda index: nullcontext()))
        enter(patch.object(cupy.cuda.compiler, "function", SimpleNamespace(Module=Loaded)))
        enter(
            patch.object(cupy.cuda.compiler, "_get_arch_for_options_for_nvrtc", lambda arch: ("-arch=sm_90", "cubin"))
        )
        compiler.module(SPEC, 0)


# Faults that a process plants in itself -------------------------------------------------------------------------------


def signal_while_compiling(number):
    """Let the process get a signal while NVRTC compiles for the first time."""
    if number == signal.SIGINT:
        # A shell without job control lets what it starts in the background ignore it.
        signal.signal(number, signal.default_int_handler)
    nvrtc = compiler.import_cupy().cuda.compiler.nvrtc
    compile_program = nvrtc.compileProgram

    def interrupted(program, options):
        nvrtc.compileProgram = compile_program
        signals = threading.Timer(SOON_S, os.kill, (os.getpid(), number))
        signals.start()
        try:
            return compile_program(program, options)
        finally:
            # On a fast machine the signal comes a moment after.
            signals.join()

    nvrtc.compileProgram = interrupted


def kill_while_writing():
    """Let the process end before the first binary has its name."""
    os.replace = lambda *_: os.kill(os.getpid(), signal.SIGKILL)


def limit_files(size):
    """Let no file grow beyond some bytes, as on a full disk."""
    if torch.cuda.is_available():
        # The driver has files of its own.
        torch.ones(1, device="cuda").sum().item()
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


def take_cupy(folder):
    """Let the process find the CuPy of a folder."""
    sys.path.insert(0, str(folder))


def lose_nvrtc():
    """Let NVRTC be that of another CUDA, which is not there."""
    import cupy

    def fail():
        raise RuntimeError("CuPy failed to load libnvrtc.so.12: cannot open shared object file")

    cupy.cuda.nvrtc = SimpleNamespace(getVersion=fail)


def no_user():
    """Let the user have no entry, as in a container that runs under a number."""
    os.path.expanduser = lambda path: path


# The process ----------------------------------------------------------------------------------------------------------


class Compiling:
    """A process that plants a fault and then compiles.

    Args:
        plant: A function of this module with its arguments, called first.
        again: Whether it compiles once more after an interrupt.
        barrier: What it waits for before it compiles.
        folder: Where it runs.
        environment: Changes of the environment; None removes a variable.
    """

    def __init__(self, plant=None, again=False, barrier=None, folder=None, **environment):
        self._receiver, sender = CONTEXT.Pipe(duplex=False)
        arguments = (
            sender,
            plant,
            again,
            barrier,
            folder and str(folder),
            {k: v and str(v) for k, v in environment.items()},
        )
        self.process = CONTEXT.Process(target=_compile, args=arguments)
        self.process.start()
        sender.close()

    def result(self):
        """Return "compiled", an error, or the number of the signal that ended the process, and what was logged."""
        try:
            result = self._receiver.recv()
        except EOFError:
            result = None
        self.process.join()
        return (-self.process.exitcode, []) if result is None else result


def _compile(sender, plant, again, barrier, folder, environment):
    for name, value in environment.items():
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value
    if folder is not None:
        os.chdir(folder)
    told = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())
    logging.getLogger("pyg_dfgnn").addHandler(handler)
    try:
        if plant is not None:
            plant[0](*plant[1:])
        if barrier is not None:
            barrier.wait()
        try:
            compile_and_run()
        except KeyboardInterrupt:
            told.append("interrupted")
            if not again:
                raise
            compile_and_run()
        sender.send(("compiled", told))
    except BaseException as error:
        sender.send((f"{type(error).__name__}: {error}", told))

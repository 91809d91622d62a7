"""Builds kernel texts with the host compiler and launches them on numpy arrays behind guard pages."""

import ctypes
import functools
import gzip
import hashlib
import importlib.util
import mmap
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

import numpy as np
from filelock import FileLock

ORDERS = ("forward", "reverse", "random")
SHIM = Path(__file__).with_name("emulator.h")
RUNTIME = SHIM.with_suffix(".cpp")
SHIM_TEXT = "".join(path.read_text() for path in (*sorted(SHIM.parent.glob("*.h")), RUNTIME))
DYNAMIC_SHARED = re.compile(r"extern\s+__shared__\s+(?:__align__\(\d+\)\s+)?([\w ]+?)\s+(\w+)\s*\[\s*\]\s*;")
ENTRY = re.compile(r'extern\s+"C"\s+__global__\s+void\s+(?:__launch_bounds__\s*\([^)]*\)\s*)?(\w+)\s*\(')
MACRO = re.compile(r"^[ \t]*#[ \t]*define[ \t]+(\w+)", re.MULTILINE)
DONE, FAILED, FAULT = range(3)
MACHINE = platform.machine()
FAMILY = "x86" if MACHINE == "x86_64" else MACHINE
# Without optimisation: most kernels run for less time than they take to compile.
FLAGS = (
    f"--target={MACHINE}-linux-gnu",
    *("-std=c++17", "-O0", "-w", "-fPIC", "-fvisibility=hidden", "-fno-strict-aliasing", "-ffp-contract=off"),
    *("-fno-exceptions", "-fno-asynchronous-unwind-tables", "-ftrivial-auto-var-init=pattern", "-fsanitize=alignment"),
    *("-fsanitize-trap=alignment", "-fsanitize-debug-trap-reasons=none", "-nostdinc", "-D__GLIBC_MINOR__=31"),
)

libc = ctypes.CDLL(None, use_errno=True)
libm = ctypes.CDLL("libm.so.6", mode=ctypes.RTLD_GLOBAL)


class EmulationError(RuntimeError):
    """A kernel did what is an error on a GPU, whether or not the GPU would report it."""


class Launch(ctypes.Structure):
    """The structure of the same name in emulator.h."""

    _fields_ = [
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("args", ctypes.POINTER(ctypes.c_void_p)),
        ("shared_bytes", ctypes.c_uint64),
        ("seed", ctypes.c_uint64),
        ("order", ctypes.c_int),
        ("shared", ctypes.c_void_p),
        ("fault_address", ctypes.c_void_p),
        ("fault_code", ctypes.c_void_p),
        ("fault_signal", ctypes.c_int),
        ("fault_write", ctypes.c_int),
        ("message", ctypes.c_char * 1024),
    ]


class GuardedMemory:
    """A copy of some bytes that touches a protected page on one side, and poison (0xff) up to the other.

    At the end of its pages the copy starts at a multiple of the largest power of two in its size, so rows that are
    loaded as vectors keep their alignment.
    """

    def __init__(self, data: bytes, at_end: bool, name: str) -> None:
        self.name, self.size = name, len(data)
        page = mmap.PAGESIZE
        pages = -(-self.size // page) * page
        self.map = mmap.mmap(-1, pages + 2 * page)
        self.first = ctypes.addressof(ctypes.c_char.from_buffer(self.map)) + page
        self.pages = pages
        self.offset = pages - self.size if at_end else 0
        self.address = self.first + self.offset
        self.map[page : page + pages] = b"\xff" * self.offset + data + b"\xff" * (pages - self.offset - self.size)
        self.protect(self.first - page, page, 0)
        self.protect(self.first + pages, page, 0)

    @staticmethod
    def protect(address: int, size: int, flags: int) -> None:
        if libc.mprotect(ctypes.c_void_p(address), ctypes.c_size_t(size), flags):
            raise OSError(ctypes.get_errno(), "mprotect failed")

    def make_read_only(self) -> None:
        self.protect(self.first, self.pages, mmap.PROT_READ)

    def read(self) -> bytes:
        return ctypes.string_at(self.address, self.size)

    def check_poison(self) -> None:
        before = ctypes.string_at(self.first, self.offset)
        after = ctypes.string_at(self.address + self.size, self.pages - self.offset - self.size)
        for side, poison in (("before", before), ("after", after)):
            if poison.strip(b"\xff"):
                raise EmulationError(f"out-of-bounds write {side} {self.name}")

    def near(self, address: int) -> str | None:
        """Where an address lies relative to the data, if it lies on these pages or their guards."""
        if not self.first - mmap.PAGESIZE <= address < self.first + self.pages + mmap.PAGESIZE:
            return None
        if address < self.address:
            return f"{self.address - address} bytes before {self.name}"
        if address >= self.address + self.size:
            return f"{address - self.address - self.size} bytes past the end of {self.name}"
        return f"{address - self.address} bytes into {self.name}, which is read-only"


@functools.cache
def compiler() -> tuple[str, ...] | None:
    """Clang of the package `ziglang` with its flags and its headers of C, or None where it is not installed."""
    package = importlib.util.find_spec("ziglang")
    if package is None or package.origin is None or sys.platform != "linux":
        return None
    folder = Path(package.origin).parent
    headers = ("include", *(f"libc/include/{name}" for name in (f"{FAMILY}-linux-gnu", "generic-glibc")))
    headers += tuple(f"libc/include/{name}-linux-any" for name in (FAMILY, "any"))
    return (str(folder / "zig"), "clang", *FLAGS, *(f"-isystem{folder / 'lib' / name}" for name in headers))


def cache_folder() -> Path:
    """Where libraries are kept: $PYG_DFGNN_EMULATOR_CACHE, or a folder of the user among the temporary files."""
    default = Path(tempfile.gettempdir()) / f"pyg-dfgnn-emulator-{os.getuid()}"
    folder = Path(os.environ.get("PYG_DFGNN_EMULATOR_CACHE", default))
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def digest(*texts: str) -> str:
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:24]


def run_compiler(command: Sequence[str], target: Path, scratch: str) -> None:
    """Runs a step of the host compiler in `scratch`, and puts what it writes there as `out` at `target` in one go."""
    done = subprocess.run([*command, "-o", "out"], check=False, capture_output=True, text=True, cwd=scratch)
    if done.returncode:
        raise EmulationError(f"the host compiler refuses the kernel:\n{done.stderr}")
    os.replace(f"{scratch}/out", target)


@functools.cache
def precompiled_shim(command: tuple[str, ...], kept: Path) -> Path:
    """The folder, among what is kept, of the compiled header and of the runtime that each library is linked with.

    The compiler refuses a compiled header when a file it was made of is newer or gone: those of the shim lie beside it.
    """
    folder = kept / digest(SHIM_TEXT, *command, str(os.stat(command[0]).st_mtime_ns))
    folder.mkdir(exist_ok=True)
    header, runtime = folder / "header.pch", folder / "runtime.o"
    with FileLock(folder / "lock"), tempfile.TemporaryDirectory(dir=folder) as scratch:
        if not header.exists():
            for path in SHIM.parent.glob("*.h"):
                shutil.copyfile(path, folder / path.name)
            run_compiler([*command, "-x", "c++-header", str(folder / SHIM.name)], header, scratch)
        if not runtime.exists():
            run_compiler([*command, "-O2", "-c", str(RUNTIME)], runtime, scratch)
    return folder


def place_of(source: str) -> Path:
    """Where the library with a kernel text is looked for."""
    # Wherever the compiler lies, a version of it makes the same of a text.
    return cache_folder() / f"{digest(in_namespace(source, 'text'), SHIM_TEXT, version('ziglang'), *FLAGS)}.so"


def in_namespace(source: str, name: str) -> str:
    """A kernel text with its entries in a namespace of its own, after which other texts can follow."""
    body = DYNAMIC_SHARED.sub(r"\1* const \2 = reinterpret_cast<\1*>(emu::launch->shared);", source)
    # Entries of C would be one function in all namespaces.
    body = re.sub(r'extern\s+"C"\s+(?=__global__)', "", body)
    entries = "".join(f"EMU_ENTRY({name}, {entry})\n" for entry in ENTRY.findall(source))
    macros = "".join(f"#undef {macro}\n" for macro in sorted(set(MACRO.findall(source))))
    # The unnamed namespace gives shared memory in inline functions and templates a place in the section of its kind.
    return f'namespace {name} {{ namespace {{\n#line 1 "kernel.cu"\n{body}\n}} }}\n{entries}{macros}'


def compile_library(text: str, library: Path, *options: str) -> None:
    """Compiles kernel texts in their namespaces, and links them with the emulator's runtime."""
    found = compiler()
    if found is None:
        raise EmulationError("no host compiler: install ziglang")
    command = (*found, *options)
    shim = precompiled_shim(command, library.parent)
    with tempfile.TemporaryDirectory(dir=library.parent) as scratch:
        # Named as the text in it: a debugger may tell either name.
        code, compiled = Path(scratch, "kernel.cu"), Path(scratch, "kernel.o")
        code.write_text(text)
        header = ["-include-pch", str(shim / "header.pch"), f"-fdebug-prefix-map={scratch}=/emulator"]
        run_compiler([*command, *header, "-x", "c++", "-c", str(code)], compiled, scratch)
        # Functions of C are those that the process has.
        run_compiler([command[0], "ld.lld", "-shared", str(compiled), str(shim / "runtime.o")], library, scratch)


def build(sources: Sequence[str]) -> list[Path]:
    """Compiles those kernel texts that no library has into one, and returns where the library of each is.

    Texts in one library take less time than as many libraries: the compiler starts, reads its header and links once.
    """
    places = {source: place_of(source) for source in sources}
    missing = {place.stem: source for source, place in places.items() if not place.exists()}
    if not missing:
        return [places[source] for source in sources]
    text = "".join(in_namespace(source, f"text_{name}") for name, source in missing.items())
    library = cache_folder() / f"library-{digest(*missing)}.so"
    with tempfile.TemporaryDirectory(dir=library.parent) as scratch:
        kept = Path(scratch, "text")
        kept.write_bytes(gzip.compress(text.encode(), 1))
        os.replace(kept, library.with_suffix(".gz"))
        compile_library(text, library)
        for name in missing:
            link = Path(scratch, name)
            link.symlink_to(library.name)
            os.replace(link, library.with_name(f"{name}.so"))
    return [places[source] for source in sources]


class Kernel:
    """An entry of a kernel text, ready to be launched on numpy arrays.

    Args:
        source: The complete text, as it goes to NVRTC.
        entry: Name of an `extern "C" __global__` function in it.

    Raises:
        EmulationError: The text does not compile or has no such entry.
    """

    def __init__(self, source: str, entry: str) -> None:
        (place,) = build([source])
        self.entry, self.path = entry, place.resolve()
        library, name = ctypes.CDLL(str(self.path)), f"text_{place.stem}_{entry}"
        if not hasattr(library, f"emu_launch_{name}"):
            raise EmulationError(f"no entry {entry!r} (the text has {', '.join(ENTRY.findall(source)) or 'none'})")
        self.run = getattr(library, f"emu_launch_{name}")
        describe = getattr(library, f"emu_signature_{name}")
        describe.restype = ctypes.c_char_p
        self.signature: list[str] = describe().decode().split()

    def launch(
        self,
        grid: Sequence[int],
        block: Sequence[int],
        args: Sequence[np.ndarray | float | None],
        shared_bytes: int = 0,
        order: str = "forward",
        seed: int = 0,
    ) -> None:
        """Runs a grid; arrays behind non-const pointers are changed in place.

        Args:
            grid: Blocks per axis, 1 to 3 numbers.
            block: Threads per axis, 1 to 3 numbers.
            args: One per parameter: an array or None (null) for a pointer, an int for long long, a float for double.
            shared_bytes: Size of the dynamic shared memory, filled with NaN before each block.
            order: Which threads and blocks go first: forward, reverse or random (a new order at each switch).
                In reverse order the arrays touch a protected page in front of them, otherwise behind them.
            seed: Seed of the random order.

        Raises:
            EmulationError: The kernel did what is an error on a GPU, or the arguments do not fit its signature.
        """
        if len(args) != len(self.signature):
            raise EmulationError(f"{self.entry} takes {len(self.signature)} arguments (got {len(args)})")
        regions: dict[tuple[int, int], GuardedMemory] = {}
        written: dict[tuple[int, int], np.ndarray] = {}
        slots = []
        for position, (arg, kind) in enumerate(zip(args, self.signature, strict=True)):
            name = f"argument {position} of {self.entry}"
            check_argument(name, arg, kind)
            if isinstance(arg, np.ndarray):
                data = arg.tobytes()
                key = (arg.ctypes.data, len(data))
                name = f"{name} ({arg.dtype} {list(arg.shape)})"
                if key not in regions:
                    regions[key] = GuardedMemory(data, order != "reverse", name)
                if kind.startswith("write"):
                    written[key] = arg
                slots.append(ctypes.c_void_p(regions[key].address))
            elif kind == "double":
                slots.append(ctypes.c_double(arg))
            else:
                slots.append(ctypes.c_longlong(arg or 0))
        for key, region in regions.items():
            if key not in written:
                region.make_read_only()
        shared = GuardedMemory(bytes(-(-shared_bytes // 16) * 16), True, "the dynamic shared memory")
        pointers = (ctypes.c_void_p * max(len(slots), 1))(*(ctypes.addressof(slot) for slot in slots))
        state = Launch(
            args=pointers, shared_bytes=shared.size, shared=shared.address, seed=seed, order=ORDERS.index(order)
        )
        state.grid[:] = [*grid, 1, 1][:3]
        state.block[:] = [*block, 1, 1][:3]
        result = self.run(ctypes.byref(state))
        if result == FAILED:
            raise EmulationError(f"{self.entry}: {state.message.decode()}")
        if result == FAULT:
            raise EmulationError(self.describe_fault(state, [*regions.values(), shared]))
        for region in regions.values():
            region.check_poison()
        for key, array in written.items():
            array[...] = np.frombuffer(regions[key].read(), dtype=array.dtype).reshape(array.shape)

    def describe_fault(self, state: Launch, regions: list[GuardedMemory]) -> str:
        address, access = state.fault_address or 0, "write" if state.fault_write else "read"
        place = next(filter(None, (region.near(address) for region in regions)), f"address {address:#x}")
        message = f"{self.entry}: out-of-bounds {access} at {place}"
        if state.fault_signal == signal.SIGILL:
            # The trap of -fsanitize=alignment.
            message = f"{self.entry}: misaligned access"
        elif state.fault_signal not in (signal.SIGSEGV, signal.SIGBUS):
            message = f"{self.entry}: {signal.strsignal(state.fault_signal)}"
        maps = Path("/proc/self/maps").read_text().splitlines()
        # Another process may have put its build of the same text in place of this one, which is "(deleted)" then.
        base = next(int(line.split("-")[0], 16) for line in maps if str(self.path) in line)
        tool = shutil.which("addr2line")
        if tool is None:
            return message
        # A build with numbers of lines, which takes a quarter longer, has the same code at the same places.
        lines, text = self.path.with_suffix(".g1.so"), self.path.with_suffix(".gz")
        if not text.exists():
            return message
        if not lines.exists():
            compile_library(gzip.decompress(text.read_bytes()).decode(), lines, "-g1")
        command = [tool, "-i", "-e", str(lines), hex((state.fault_code or base) - base)]
        where = subprocess.run(command, check=False, capture_output=True, text=True).stdout
        return f"{message}\n{re.sub('^/emulator/', '', where, flags=re.MULTILINE)}"


def check_argument(name: str, arg: np.ndarray | float | None, kind: str) -> None:
    """Refuses what would be misread on the GPU: wrong kind, wrong element type, an array with gaps."""
    _, _, item = kind.partition(":")
    if not item:
        if not isinstance(arg, float if kind == "double" else int) or isinstance(arg, bool):
            raise EmulationError(f"{name} needs {kind} (got {type(arg).__name__})")
        return
    if arg is None:
        return
    if not isinstance(arg, np.ndarray) or not arg.flags.c_contiguous:
        raise EmulationError(f"{name} needs a contiguous array (got {type(arg).__name__})")
    given = f"{'f' if arg.dtype.kind == 'f' and arg.itemsize > 2 else 'i'}{arg.itemsize}"
    if item not in ("any", given):
        raise EmulationError(f"{name} needs items of type {item} (got {arg.dtype})")

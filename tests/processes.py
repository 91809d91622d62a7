"""Processes of tests' own that start with the libraries imported, and scripts that run in one."""

import multiprocessing
import os
import runpy
import socket
import subprocess
import sys
import traceback

import torch
import torch.multiprocessing

# Libraries ask for the GPU as they are imported, which a server must not have.
START = "forkserver" if torch.version.cuda is None else "spawn"
CONTEXT = multiprocessing.get_context(START)
# Imported once, for the processes of all tests; no layer is made of it.
CONTEXT.set_forkserver_preload(["torch_geometric.explain", "pyg_dfgnn.distributed", "pyg_dfgnn.nn", "tests.preloaded"])


def run_script(code, folder):
    """Run the text of a script in a process of its own, and return what it wrote to stdout and stderr.

    PyG and the package are imported, but no layer was ever made there.

    Args:
        code: The text.
        folder: Where what it writes is kept meanwhile.

    Raises:
        AssertionError: It failed.
    """
    done = _run(folder, _execute, code)
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


def run_file(path, options, folder, cwd, environment, size=1):
    """Run a script with options as `python` does, in a process like that of :func:`run_script`.

    Several processes are told of each other as torchrun does.

    Args:
        path: The script.
        options: Its command line.
        folder: Where what it writes is kept meanwhile.
        cwd: Where it runs.
        environment: Variables that are set for it.
        size: Number of processes.

    Returns:
        A `subprocess.CompletedProcess`.
    """
    return _run(folder, _execute_file, str(path), options, str(cwd), environment, size=size)


def _run(folder, function, *arguments, size=1):
    paths = [folder / name for name in ("stdout", "stderr")]
    for path in paths:
        path.unlink(missing_ok=True)
    arguments = [*map(str, paths)], function, *arguments
    if size > 1:
        try:
            launch(size, _redirected, *arguments)
            status = 0
        except torch.multiprocessing.ProcessExitedException as error:
            status = error.exit_code
    else:
        process = CONTEXT.Process(target=_redirected, args=arguments)
        process.start()
        process.join()
        status = process.exitcode
    return subprocess.CompletedProcess(arguments, status, *(path.read_text() for path in paths))


def _redirected(paths, function, *arguments):
    for number, path in enumerate(paths, start=1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    sys.stdout, sys.stderr = (os.fdopen(number, "w", buffering=1) for number in (1, 2))
    try:
        function(*arguments)
    except SystemExit:
        raise
    except BaseException:
        traceback.print_exc()
        sys.exit(1)


def _execute(code):
    exec(compile(code, "<script>", "exec"), {"__name__": "__main__"})


def _execute_file(path, options, cwd, environment):
    torch.set_num_threads(1)
    os.environ.update(environment)
    os.chdir(cwd)
    sys.argv[:] = [path, *options]
    sys.path.insert(0, os.path.dirname(path))
    runpy.run_path(path, run_name="__main__")


def launch(size, function, *arguments, start_method=START):
    """Run a function of a test module in so many processes that talk through gloo; any error is raised.

    They come from a server that has imported everything; "spawn" makes fresh ones, as CUDA asks for.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torch.multiprocessing.start_processes(
        _enter, (function, size, port, arguments), nprocs=size, start_method=start_method
    )


def _enter(rank, function, size, port, arguments):
    from pyg_dfgnn.distributed import Group

    torch.set_num_threads(1)
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in place.items()})
    try:
        function(*arguments)
    except BaseException:
        # The others fail as they lose the connection, and only one error is raised.
        traceback.print_exc()
        raise
    finally:
        Group.close()

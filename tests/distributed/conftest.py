"""Several processes on one machine, talking through gloo."""

import os
import socket
import traceback

import pytest
import torch
import torch.multiprocessing

from pyg_dfgnn.distributed import Group
from tests import processes


def _enter(rank, function, size, port, arguments):
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


@pytest.fixture
def launch():
    """launch(size, function, *arguments): run a function of a test module in so many processes; any error is raised.

    They come from a server that has imported everything; "spawn" makes fresh ones, as CUDA asks for.
    """

    def run(size, function, *arguments, start_method=processes.START):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        torch.multiprocessing.start_processes(
            _enter, (function, size, port, arguments), nprocs=size, start_method=start_method
        )

    return run

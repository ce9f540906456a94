"""What the harnesses in miniature share: processes of one test, with torchrun's variables, forked to be quick."""

import multiprocessing
import os
import socket

FORK = multiprocessing.get_context("fork")


def open_port():
    """A port that is free now, as each of these harnesses looks for one."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def variables(rank, world_size, port):
    """The environment of a rank."""
    own = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size}
    return {**{name: str(value) for name, value in own.items()}, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}


def run(world_size, function):
    """Call `function(rank, port)` in processes, and look at their exit codes."""
    port = open_port()
    processes = [FORK.Process(target=function, args=(rank, port)) for rank in range(world_size)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert all(process.exitcode == 0 for process in processes)


def set_variables(rank, world_size, port):
    """In a process: become a rank."""
    os.environ.update(variables(rank, world_size, port))

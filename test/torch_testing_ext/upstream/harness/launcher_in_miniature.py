"""Runs pytest in forked processes, some of them ranks as torchrun starts them: one interpreter imports torch for all.

python launcher_in_miniature.py '[[NAME, RANKS, [ARGUMENT, ...]], ...]'
"""

import json
import os
import sys

import processes
import pytest
import torch  # noqa: F401


def start(name, ranks, arguments):
    """Start the processes of one run; return their pids."""
    port = processes.open_port()
    return [start_rank(name, rank, ranks, arguments, port) for rank in range(ranks)]


def start_rank(name, rank, ranks, arguments, port):
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        if ranks > 1:
            processes.set_variables(rank, ranks, port)
        sys.argv[:] = ["pytest", *arguments]
        code = pytest.main([*arguments, f"--junitxml={name}{rank}.xml"])
    finally:
        sys.stdout.flush()
        os._exit(code)


if __name__ == "__main__":
    codes = []
    for run in json.loads(sys.argv[1]):
        codes += [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in start(*run)]
    sys.exit(any(codes))

"""Folders that do not outlive their process."""

import os
import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from torch_testing_ext._process import fork_safety, sessions

from .ends import wait_for_exit
from .signals import blocked


@contextmanager
def removed_if_killed(folder: Path) -> Iterator[None]:
    """Have a folder removed at the end, also if this process is killed: then, when its forks have ended."""
    read, write = os.pipe()
    with blocked():
        keeper = fork_safety.fork()
        if keeper == 0:
            with suppress(BaseException):
                os.setsid()
                os.close(write)
                sessions.leave_connections(read)
                # This process and its forks have the other end.
                os.read(read, 1)
                shutil.rmtree(folder, ignore_errors=True)
            os._exit(0)
    os.close(read)
    try:
        yield
    finally:
        # A program that waits for all of its children may have taken its status.
        with suppress(ProcessLookupError):
            os.kill(keeper, signal.SIGKILL)
        wait_for_exit(keeper)
        os.close(write)
        shutil.rmtree(folder, ignore_errors=True)

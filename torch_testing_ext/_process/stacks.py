"""The stacks of this process, on request.

faulthandler writes them inside of a signal handler, at any instruction. If Python is just changing a frame, the process
dies: at one request of a hundred, if it runs Python code (3.13). So Python code writes them where it can run, and
faulthandler's handler where it cannot: in a process that has been in C for a while, whose frames do not change.
"""

import faulthandler
import os
import signal
import tempfile
from contextlib import suppress

from . import system


def take() -> str:
    """The stacks of all threads, this one's without this function."""
    with tempfile.TemporaryFile("w+") as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        return "".join(line for line in file if f'"{__file__}"' not in line)


def write(file: int) -> None:
    with suppress(Exception):  # closed by the test, a full disk, too deep a recursion: nothing of that is the test's
        os.write(file, take().encode())


def write_on_request(file: int, chain: bool = False) -> None:
    """Write to `file` on DUMP_STACKS, at the next line of Python, and on DUMP_STACKS_NOW, at once.

    `chain`: then call the handler that DUMP_STACKS_NOW has now.
    """
    signal.signal(system.DUMP_STACKS, lambda *_: write(file))
    signal.siginterrupt(system.DUMP_STACKS, False)
    faulthandler.enable(file=file)
    faulthandler.register(system.DUMP_STACKS_NOW, file=file, all_threads=True, chain=chain)

"""The stacks of this process, on request.

faulthandler writes them inside of a signal handler, at any instruction. If Python is just changing a frame, the
process dies: at one request of a hundred, if it runs Python code (3.13). So Python code writes them where it can
run, and faulthandler's handler where it cannot: in a process that has been in C for a while, whose frames do not
change.
"""

import faulthandler
import os
import signal
import tempfile
from contextlib import suppress
from pathlib import Path

from .system import DUMP_STACKS, DUMP_STACKS_NOW


def stacks_of_this_process() -> str:
    """The stacks of all threads, this one's without this function."""
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        return "".join(line for line in file if f'"{__file__}"' not in line)


def write_stacks(file: int) -> None:
    # Closed by the test, a full disk, too deep a recursion: nothing of that is the test's.
    with suppress(Exception):
        os.write(file, stacks_of_this_process().encode())


def write_on_request(path: Path, chain: bool = False) -> int:
    """Write to a file on DUMP_STACKS, at the next line of Python, and on DUMP_STACKS_NOW, at once.

    `chain`: then call the handler that DUMP_STACKS_NOW has now. Returns the descriptor of the file.
    """
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    signal.signal(DUMP_STACKS, lambda *_: write_stacks(file))
    signal.siginterrupt(DUMP_STACKS, False)
    faulthandler.enable(file=file)
    faulthandler.register(DUMP_STACKS_NOW, file=file, all_threads=True, chain=chain)
    return file

"""Programs on terminals of their own."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import select
import signal
import struct
import termios
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

# Seconds until a busy machine has shown what is expected.
LIMIT = 120.0


class Terminal:
    """A program on a terminal of its own, and what it has written there."""

    def __init__(self, columns: int, words: Sequence[str], cwd: str | Path, env: Mapping[str, str]) -> None:
        self.pid, self.ours = pty.fork()
        if self.pid == 0:
            fcntl.ioctl(0, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
            os.chdir(cwd)
            os.execvpe(words[0], words, env)
        self._unread = ""
        self.widest = 0

    def expect(self, text: str) -> None:
        """Wait until the text is there. What is never written fails, with what was."""
        end = time.monotonic() + LIMIT
        while text not in self._unread:
            if not select.select([self.ours], [], [], max(0.0, end - time.monotonic()))[0]:
                raise AssertionError(f"{text!r} is not in {self._unread!r}")
            written = os.read(self.ours, 1 << 16).decode()
            moved = re.sub(r"\x1b\[[0-9;?]*[A-HJKhl]", "\n", written)  # to another place
            shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", moved)
            self.widest = max(self.widest, *(len(line) for line in re.split("[\r\n]+", shown)))
            self._unread += shown
        self._unread = self._unread.partition(text)[2]

    def expect_end(self) -> None:
        """Wait until the program has ended, so that it leaves nothing behind."""
        end = time.monotonic() + LIMIT
        # A terminal whose program has ended can no longer be read.
        with contextlib.suppress(OSError):
            while select.select([self.ours], [], [], max(0.0, end - time.monotonic()))[0]:
                if not os.read(self.ours, 1 << 16):
                    return
            raise AssertionError("the program has not ended")

    def press(self, keys: str) -> None:
        os.write(self.ours, keys.encode())

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError, ChildProcessError):
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
        os.close(self.ours)

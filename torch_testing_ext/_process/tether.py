"""Runs a program that does not outlive the process that started it: `PARENT COMMAND...` as words."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence

from . import interpreter, signals, system


def tethered(words: Sequence[str]) -> list[str]:
    """The command that runs `words`, which get SIGTERM when this process ends, however it does."""
    return interpreter.command("_process.tether", sys.path, str(os.getpid()), *words)


def main() -> None:
    """Becomes the program."""
    parent, *words = sys.argv[1:]
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # whatever was inherited: an ignored signal survives exec
    signals.unblock()
    system.die_with(int(parent), signal.SIGTERM)
    os.execvp(words[0], words)

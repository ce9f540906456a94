"""Commands that start a new interpreter."""

import os
import signal
import subprocess
import sys
from collections.abc import Sequence

from . import system
from .signals import unblock

# Code that each of these interpreters runs before it imports any test, and passes on to those that it starts.
RUN_FIRST: list[str] = []


def command(module: str, path: Sequence[object], *words: str) -> list[str]:
    """The command for an interpreter like this one that runs `main()` of a module of this package.

    `path` becomes its sys.path.
    """
    # Python ignores entries of sys.path that are not strings, and their repr might not be a literal.
    entries = [entry for entry in path if isinstance(entry, str)]
    run = f"from torch_testing_ext.{module} import main; main()"
    code = "; ".join([f"import sys; sys.path[:] = {entries!r}", *RUN_FIRST, run])
    flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    return [sys.executable, *flags, "-c", code, *words]


def tethered(words: Sequence[str]) -> list[str]:
    """The command that runs `words`, which get SIGTERM when this process ends, however it does."""
    parent = str(os.getpid())
    return command("_process.interpreters", sys.path, parent, *words)


def main() -> None:
    """Become a tethered program: `PARENT COMMAND...` as words."""
    parent, *words = sys.argv[1:]
    # Whatever was inherited: an ignored signal survives exec.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    unblock()
    system.die_with(int(parent), signal.SIGTERM)
    os.execvp(words[0], words)

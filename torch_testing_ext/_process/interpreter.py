"""The command that starts a new interpreter to run a module of this package."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence

# Code that each of these interpreters runs before it imports any test, and passes on to those that it starts.
RUN_FIRST: list[str] = []


def command(module: str, path: Sequence[object], *words: str) -> list[str]:
    """The command for an interpreter like this one that runs `main()` of a module of this package.

    `path` becomes its sys.path.
    """
    # Python ignores entries of sys.path that are not strings, and their repr might not be a literal.
    entries = [entry for entry in path if isinstance(entry, str)]
    run = f"from torch_testing_ext.{module} import main; main()"
    code = "; ".join(["import sys", f"sys.path[:] = {entries!r}", *RUN_FIRST, run])
    flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    return [sys.executable, *flags, "-c", code, *words]

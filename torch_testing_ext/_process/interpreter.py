"""New interpreters: the command that starts one to run a module of this package."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence

# Code that each of these interpreters runs before it imports what is tested, and hands on to those it starts.
RUN_FIRST: list[str] = []


def command(module: str, path: Sequence[object], *words: str) -> list[str]:
    """An interpreter like this one that runs `main()` of a module of this package, with this path to find modules."""
    # Python ignores entries of sys.path that are not strings; their repr might not be a literal.
    entries = [entry for entry in path if isinstance(entry, str)]
    run = f"from torch_testing_ext.{module} import main; main()"
    code = "; ".join(["import sys", f"sys.path[:] = {entries!r}", *RUN_FIRST, run])
    flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    return [sys.executable, *flags, "-c", code, *words]

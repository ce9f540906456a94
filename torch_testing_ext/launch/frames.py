"""Finds which frames of a stack belong to the harness and not to a test, by markers in their modules.

    __rank_frame__ = True                    no frame of this module belongs to the test
    __first_frames__ = ("_run", "_answer")   below these functions lies the stack of the process that forked this one
    __unittest = True                        unittest's own marker: its frames, and those of ours that tracebacks omit

The frames of pytest, and of the plugin system below it, are like those of unittest.

The markers are read from the source: the process that shows a stack may not have imported the modules in it.
"""

from __future__ import annotations

import ast
import functools
import os
import re
from dataclasses import dataclass
from pathlib import Path

_HARNESS = re.compile(r"^__rank_frame__ = True\b", re.MULTILINE)
_UNITTEST = re.compile(r"^__unittest = True\b", re.MULTILINE)
# Not all modules of unittest have its marker.
_UNITTEST_FOLDER = os.path.join(os.path.dirname(os.__file__), "unittest", "")
_PYTEST_FOLDER = re.compile(r"/(?:_pytest|pluggy)/")
_FIRST = re.compile(r"^__first_frames__ = (\(.*\))", re.MULTILINE)


@dataclass(frozen=True)
class Markers:
    """The markers of one module."""

    harness: bool
    unittest: bool
    first_frames: frozenset[str]


@functools.cache
def markers_of(file: str) -> Markers:
    """The markers in a source file; none if it cannot be read."""
    try:
        source = Path(file).read_text(encoding="utf-8", errors="replace")
    except (OSError, ValueError):
        source = ""
    first = _FIRST.search(source)
    is_unittest = file.startswith(_UNITTEST_FOLDER) or bool(_UNITTEST.search(source) or _PYTEST_FOLDER.search(file))
    return Markers(bool(_HARNESS.search(source)), is_unittest, frozenset(ast.literal_eval(first[1]) if first else ()))

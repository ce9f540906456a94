"""Records which functions of the package run in a story: in all processes, from a fault to the message about it.

A subject calls `begin()` where its fault happens, and who reports it calls `end()`, or the story ends with the last
process. What a process runs before and after that is not recorded, nor what an import runs.
"""

from __future__ import annotations

import mmap
import os
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import CodeType, FrameType

import torch_testing_ext

PACKAGE = f"{Path(torch_testing_ext.__file__).parent}{os.sep}"
_FOLDER = "TRACED_STORY"
# Python runs this module of the search path as it starts.
_AT_START = "from kit import story\nstory.record()\n"


class _Recorder:
    """Writes down each function of the package that a process calls while the story goes on, once."""

    def __init__(self, folder: Path) -> None:
        self._calls = folder / "calls"
        with open(folder / "goes_on", "r+b") as file:
            # All processes see when the story begins and ends.
            self.goes_on = mmap.mmap(file.fileno(), 1)
        self._recorded: set[CodeType] = set()
        # How many modules are being executed in a thread.
        self._importing = threading.local()

    def record(self) -> None:
        """Record this thread, those that it starts, and the processes that are forked off it."""
        threading.setprofile(self._on_call)
        sys.setprofile(self._on_call)

    def _on_call(self, frame: FrameType, event: str, argument: object) -> None:
        code = frame.f_code
        if event not in ("call", "return") or not code.co_filename.startswith(PACKAGE):
            return
        depth = getattr(self._importing, "depth", 0)
        if code.co_name == "<module>":
            if frame.f_globals["__name__"] == "__main__":
                # The program itself: nothing imports it.
                return
            self._importing.depth = depth + (1 if event == "call" else -1)
        elif event == "call" and not depth and self.goes_on[0] == 1 and code not in self._recorded:
            self._recorded.add(code)
            line = f"{os.getpid()} {code.co_filename.removeprefix(PACKAGE)} {code.co_name}\n"
            # A rank closes the descriptors that it does not know.
            calls = os.open(self._calls, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
            os.write(calls, line.encode())
            os.close(calls)


_recorder: _Recorder | None = None


def record() -> None:
    """Record this process, if it belongs to a story."""
    global _recorder
    if _FOLDER in os.environ:
        _recorder = _Recorder(Path(os.environ[_FOLDER]))
        _recorder.record()


def begin() -> None:
    """The fault happens now."""
    assert _recorder is not None, "this process does not belong to a story"
    _recorder.goes_on[0] = 1


def end() -> None:
    """The message is there."""
    assert _recorder is not None, "this process does not belong to a story"
    _recorder.goes_on[0] = 0


def environment_of_story(folder: Path, environ: Mapping[str, str], paths: Sequence[str]) -> dict[str, str]:
    """The variables of a program whose processes are recorded in a folder; `paths` are for its modules."""
    folder.mkdir()
    (folder / "goes_on").write_bytes(b"\0")
    (folder / "at_start").mkdir()
    (folder / "at_start" / "sitecustomize.py").write_text(_AT_START, encoding="utf-8")
    kit = str(Path(__file__).parents[1])
    path = os.pathsep.join([str(folder / "at_start"), kit, *paths])
    return {**environ, _FOLDER: str(folder), "PYTHONPATH": path}


def functions_of_story(folder: Path) -> dict[str, list[str]]:
    """The files that ran, and their functions, in the order in which they were called first."""
    functions: dict[str, list[str]] = {}
    for line in (folder / "calls").read_text(encoding="utf-8").splitlines():
        _, file, name = line.split()
        names = functions.setdefault(file, [])
        if name not in names:
            names.append(name)
    return functions

"""The files and folders that a process has read, and whether they are as they were: asked by stat, never assumed."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from functools import partial
from typing import Any

from torch_testing_ext._process.read_hook import NOT_FILES, ReadHook, may_write, path_of

# No file system that we know has times coarser than a second: a younger file could change without a trace.
_COARSEST = 2.0
_NOT_FILES = (*NOT_FILES, "[")
# The column of a line of /proc/self/maps at which its path begins.
_PATH_IN_MAPS = 73

Stamp = tuple[int, ...]


def stamp(path: str) -> Stamp | None:
    """Identify the contents of a file without reading it; None if there is none."""
    try:
        status = os.stat(path)
    except (OSError, ValueError):
        return None
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


def names_in(folder: str) -> frozenset[str]:
    """The names in a folder, but for that of compiled files; none if it cannot be read."""
    with contextlib.suppress(OSError):
        return frozenset(os.listdir(folder)) - {"__pycache__"}
    return frozenset()


class ReadRecord:
    """Files by their stamps, and folders by their names. Files that were looked for in vain count, too."""

    def __init__(self) -> None:
        self.files: dict[str, Stamp | None] = {}
        self.folders: dict[str, tuple[Stamp | None, frozenset[str]]] = {}
        self._started = time.time()

    def add_file(self, path: str) -> None:
        if path not in self.files:
            self.files[path] = stamp(path)

    def add_folder(self, path: str) -> None:
        if path not in self.folders:
            self.folders[path] = stamp(path), names_in(path)

    def changed(self) -> str | None:
        """A file or folder that is not as it was when it was read; None if all are."""
        for path, before in self.files.items():
            if stamp(path) != before:
                return path
        for path, (before, names) in [*self.folders.items()]:
            now = stamp(path)
            if now == before:
                continue
            if names_in(path) != names:
                return path
            # Its names are asked for again next time, if they could change without a trace.
            trusted = None if self._is_young(now) else now
            self.folders[path] = trusted, names
        return None

    def unsettled(self) -> str | None:
        """A file that may have changed since this process read it; None if there is none."""
        for path, (_, names) in self.folders.items():
            # Its stamp was taken before the names.
            self.folders[path] = None, names
        for path, read in self.files.items():
            if self._is_young(read):
                return path
        return self.changed()

    def _is_young(self, found: Stamp | None) -> bool:
        """Whether a file may have changed after its stamp was taken without changing the stamp."""
        if found is None:
            return False
        _, _, _, modified, changed = found
        settled = min(self._started, time.time()) - _COARSEST
        return max(modified, changed) > settled * 1e9

    def add_modules(self, names: list[str]) -> None:
        """Add the sources of modules, and the shared libraries that this process has mapped."""
        for name in names:
            spec = getattr(sys.modules.get(name), "__spec__", None)
            origin = getattr(spec, "origin", None)
            if isinstance(origin, str) and os.path.isabs(origin):
                self.add_file(origin)
        with open("/proc/self/maps", "rb") as maps:
            mapped = {os.fsdecode(line[_PATH_IN_MAPS:].strip()) for line in maps}
        for path in mapped:
            if path.startswith("/") and not path.startswith(_NOT_FILES):
                self.add_file(path)

    def record_reads(self) -> list[str]:
        """Add what this process reads from now on, until `stop` is called. Returns the files that it writes."""
        written: list[str] = []
        add = partial(self._add, written)
        self._hook = ReadHook(dict.fromkeys(("open", "os.listdir", "os.scandir"), add), self._never_fresh)
        return written

    def stop(self) -> None:
        self._hook.stop()

    def _never_fresh(self, event: str) -> None:
        """An event cannot be read: what it was about may have changed at any time."""
        self.files["/"] = None

    def _add(self, written: list[str], event: str, opened: Any = None, mode: Any = None, flags: Any = 0) -> None:
        path = path_of(opened)
        # The source of a compiled file, wherever that is, is added with its module.
        if path is None or path.startswith(_NOT_FILES) or ".pyc" in os.path.basename(path):
            return
        if event != "open":
            self.add_folder(path)
        elif may_write(flags):
            written.append(path)
        else:
            self.add_file(path)

"""Stamps of the files and folders that a process reads while it imports, which show whether they are as they were."""

from __future__ import annotations

import importlib.machinery
import os
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

from torch_testing_ext._process.read_hook import NOT_FILES, Listener, ReadHook, may_write, path_of

# No file system that we know has times coarser than a second: a younger file could change without a trace.
_COARSEST = 2.0
# Python's module `site` reads these before any code of ours runs.
_READ_BY_SITE = (".pth", "customize.py")
# Names that say what is installed in a folder of sys.path.
_OF_INSTALLED = (".dist-info", ".egg-info", ".egg-link", ".pth")
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


class SearchedNames:
    """A finder that finds nothing, and notes the top-level names of all modules that are looked for."""

    def __init__(self) -> None:
        self.names = {_stem(name) for name in sys.modules}

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        self.names.add(_stem(name))
        return None


def _stem(name: str) -> str:
    return name.partition(".")[0]


class Stamps:
    """Files by their stamps, and folders by their names. Files that were looked for in vain count, too."""

    def __init__(self) -> None:
        self.files: dict[str, Stamp | None] = {}
        self.folders: dict[str, tuple[Stamp | None, frozenset[str]]] = {}
        self._started = time.time()
        self._path = frozenset(os.path.abspath(entry) for entry in sys.path)
        self._searched = SearchedNames()

    # -- what this process reads

    def begin(self) -> None:
        """Note what this process reads and looks for from now on, and what it has read to start."""
        sys.meta_path.insert(0, self._searched)
        listeners: dict[str, Listener] = {
            "open": self._on_open,
            "os.listdir": self._on_list,
            "os.scandir": self._on_list,
        }
        self._hook = ReadHook(listeners, self._on_error)
        self.add_file(os.path.join(sys.prefix, "pyvenv.cfg"))
        for folder in self._path:
            self.add_folder(folder)
            for name in self.folders[folder][1]:
                if name.endswith(_READ_BY_SITE):
                    self.add_file(os.path.join(folder, name))

    def end(self) -> None:
        """Note nothing any more: this process is a fork that imports for itself."""
        self._hook.stop()
        sys.meta_path.remove(self._searched)

    def _on_error(self, event: str) -> None:
        """An event cannot be read, and what it was about may change at any time: never be fresh again."""
        self.files["/"] = None

    def _on_open(self, event: str, opened: Any = None, mode: Any = None, flags: Any = 0) -> None:
        path = path_of(opened)
        # The source of a compiled file, wherever that is, is added with its module.
        if path is not None and not may_write(flags) and ".pyc" not in os.path.basename(path):
            self.add_file(path)

    def _on_list(self, event: str, folder: Any = None) -> None:
        path = path_of(folder)
        if path is not None:
            self.add_folder(path)

    def add_file(self, path: str) -> None:
        if path not in self.files and not path.startswith(NOT_FILES):
            self.files[path] = stamp(path)

    def add_folder(self, path: str) -> None:
        if path not in self.folders and not path.startswith(NOT_FILES):
            self.folders[path] = stamp(path), _names_in(path)

    def add_modules(self) -> None:
        """Add the sources of all modules, and the shared libraries that this process has mapped."""
        for module in [*sys.modules.values()]:
            origin = getattr(getattr(module, "__spec__", None), "origin", None)
            if isinstance(origin, str) and os.path.isabs(origin):
                self.add_file(origin)
        with open("/proc/self/maps", "rb") as maps:
            mapped = {os.fsdecode(line[_PATH_IN_MAPS:].strip()) for line in maps}
        for path in mapped:
            if path.startswith("/"):
                self.add_file(path)

    # -- whether it has changed

    def changed(self) -> str | None:
        """A file or folder that is not as it was when it was read; None if all are."""
        for path, before in self.files.items():
            if stamp(path) != before:
                return path
        for path, (before, names) in [*self.folders.items()]:
            now = stamp(path)
            if now == before:
                continue
            if self._that_count(path, _names_in(path)) != self._that_count(path, names):
                return path
            # The names are asked for again next time, if they could change without a trace.
            self.folders[path] = (None if self._is_young(now) else now), names
        return None

    def unsettled(self) -> str | None:
        """A file or folder that may have changed since this process has read it; None if there is none."""
        for path, (_, names) in self.folders.items():
            # The stamp was taken before the names.
            self.folders[path] = None, names
        for path, before in self.files.items():
            if self._is_young(before):
                return path
        return self.changed()

    def _that_count(self, folder: str, names: Iterable[str]) -> set[str]:
        """The names that matter: in a folder of sys.path, those that an import may find, and what is installed."""
        if folder not in self._path:
            return {*names}
        return {name for name in names if _stem(name) in self._searched.names or name.endswith(_OF_INSTALLED)}

    def _is_young(self, found: Stamp | None) -> bool:
        """Whether a file may have changed after its stamp was taken without changing the stamp."""
        if found is None:
            return False
        _, _, _, modified, changed = found
        settled = min(self._started, time.time()) - _COARSEST
        return max(modified, changed) > settled * 1e9


def _names_in(folder: str) -> frozenset[str]:
    """The names in a folder, but for that of compiled files; none if it cannot be read."""
    with suppress(OSError):
        return frozenset(os.listdir(folder)) - {"__pycache__"}
    return frozenset()

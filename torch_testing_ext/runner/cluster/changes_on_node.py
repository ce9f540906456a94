"""The changes of a project, found on a node."""

import hashlib
import os
from collections.abc import Iterator, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import NamedTuple

from .agent_messages import FileChanged
from .project_changes import LARGEST_FILE

LEFT_OUT = {".git", ".hg", ".venv", "venv", "__pycache__", "node_modules", ".torch_testing_ext", ".pytest_cache"}


_ACCEPTED = (".py", ".expect")


def matches_pattern(name: str, patterns: Sequence[str]) -> bool:
    """Whether a file, or a folder that it is in, matches a pattern, in which `*` stands for slashes, too."""
    for pattern in patterns:
        folder = pattern.rstrip("/")
        if fnmatch(name, pattern) or fnmatch(name, f"{folder}/*"):
            return True
    return False


class _FileState(NamedTuple):
    modified: int
    size: int


class ProjectWatch:
    """The state of a node's copy of the project before its tests, and the files that differ from it."""

    def __init__(self, root: Path, patterns: Sequence[str], accepts: bool):
        """`accepts`: tests rewrite expected texts, which come back by themselves."""
        self._root = root
        self._patterns = patterns
        self._accepts = accepts
        self._before = dict(self._states())

    def _states(self) -> Iterator[tuple[str, _FileState]]:
        for folder, folders, files in os.walk(self._root):
            folders[:] = [name for name in folders if name not in LEFT_OUT]
            for name in files:
                path = os.path.join(folder, name)
                try:
                    status = os.lstat(path)
                except OSError:
                    continue
                yield os.path.relpath(path, self._root), _FileState(status.st_mtime_ns, status.st_size)

    def changes(self) -> Iterator[FileChanged]:
        """The files of the project that have changed, and new files that are wanted."""
        after = dict(self._states())
        for name in sorted(self._before.keys() - after.keys()):
            yield FileChanged(name, "", None)
        for name, state in sorted(after.items()):
            if state == self._before.get(name):
                continue
            is_wanted = self._is_wanted(name)
            path = self._root / name
            if not path.is_file() or not (is_wanted or name in self._before):
                continue
            if state.size > LARGEST_FILE:
                yield FileChanged(name, f"{state.size >> 20} MiB", None)
                continue
            content = path.read_bytes()
            digest = hashlib.sha256(content).hexdigest()
            yield FileChanged(name, digest, content if is_wanted else None)

    def _is_wanted(self, name: str) -> bool:
        if matches_pattern(name, self._patterns):
            return True
        if not self._accepts or not name.endswith(_ACCEPTED):
            return False
        return name in self._before or name.endswith(".expect")

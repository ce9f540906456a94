"""The files of the project that tests change on the nodes: found there, merged and written here."""

import difflib
import hashlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from torch_testing_ext._process.words import first_names

from .agent_messages import FileChanged

LEFT_OUT = {".git", ".hg", ".venv", "venv", "__pycache__", "node_modules", ".torch_testing_ext", ".pytest_cache"}
# Bytes of a file that comes back.
LARGEST_FILE = 256 << 20
_ACCEPTED = (".py", ".expect")


def matches_pattern(name: str, patterns: Sequence[str]) -> bool:
    """Whether a file, or a folder that it is in, matches a pattern, in which `*` stands for slashes, too."""
    for pattern in patterns:
        folder = pattern.rstrip("/")
        if fnmatch(name, pattern) or fnmatch(name, f"{folder}/*"):
            return True
    return False


# -- on a node


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


# -- here


class _Version(NamedTuple):
    node: str
    content: bytes


@dataclass(frozen=True, order=True)
class _Edit:
    """Lines that take the place of others: those from `start` to `end`, which are the same for an insertion."""

    start: int
    end: int
    lines: tuple[bytes, ...]


class ComingBack:
    """The files that nodes have sent, to be written when all nodes have ended."""

    def __init__(self, root: Path, sent: Callable[[str], bytes | None], elsewhere: Mapping[str, Path]):
        """`sent`: a file as the nodes got it. `elsewhere`: folders of the project on nodes that are others here."""
        self._root = root
        self._sent = sent
        self._elsewhere = elsewhere
        self._versions: dict[str, list[_Version]] = {}
        self._stays: set[str] = set()

    def add(self, node: str, changed: FileChanged) -> None:
        before = self._sent(changed.name)
        digest = "" if before is None else hashlib.sha256(before).hexdigest()
        if changed.digest == digest:
            # It was only touched, or the set-up had created it and a test has removed it.
            return
        if changed.content is None:
            self._stays.add(changed.name)
            return
        versions = self._versions.setdefault(changed.name, [])
        versions.append(_Version(node, changed.content))

    def write(self) -> tuple[list[str], list[str]]:
        """Write all that came. Returns the names of the files written, and warnings."""
        written = []
        warnings = []
        for name, versions in sorted(self._versions.items()):
            try:
                written += self._write_file(name, versions)
            except (OSError, ValueError) as error:
                warnings.append(f"{name}, which tests have changed on nodes, stays as it is here: {error}")
        stays = sorted(self._stays - self._versions.keys())
        if stays:
            warnings.append(
                f"tests have changed files of the project on nodes, which stay as they are here: {first_names(stays)}; "
                "name them with cluster.fetch"
            )
        self._versions = {}
        self._stays = set()
        return written, warnings

    def _write_file(self, name: str, versions: Sequence[_Version]) -> list[str]:
        """Write a file with the changes of all nodes. Returns the names of the files written."""
        path = self._place(name)
        before = self._sent(name)
        if before is None:
            return self._write_new(path, versions)
        current = path.read_bytes() if path.exists() else before
        # Each content once.
        contents = list(dict.fromkeys(version.content for version in versions))
        merged = merge_versions(before, [current, *contents])
        if merged is None:
            nodes = " and ".join(dict.fromkeys(version.node for version in versions))
            if current != before:
                nodes += " and here"
            raise ValueError(f"its changes on {nodes} contradict each other")
        path.write_bytes(merged)
        return [name]

    def _write_new(self, path: Path, versions: Sequence[_Version]) -> list[str]:
        """Write a file that nodes have created: one that differs from the first gets the name of its node, too."""
        shown = str(path)
        if path.is_relative_to(self._root):
            shown = str(path.relative_to(self._root))
        first = versions[0].content
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(first)
        others = {version.node: version.content for version in versions if version.content != first}
        written = [shown]
        for node, content in others.items():
            path.with_name(f"{path.name}@{node}").write_bytes(content)
            written.append(f"{shown}@{node}")
        return written

    def _place(self, name: str) -> Path:
        parts = PurePosixPath(name).parts
        if not parts or ".." in parts or name.startswith("/"):
            raise ValueError("it is not below the project")
        base = self._root
        if parts[0] in self._elsewhere:
            base = self._elsewhere[parts[0]]
            parts = parts[1:]
        path = base.joinpath(*parts)
        if not path.parent.resolve().is_relative_to(base.resolve()) or path.is_symlink():
            raise ValueError("a symbolic link leads to it")
        return path


def merge_versions(before: bytes, versions: Sequence[bytes]) -> bytes | None:
    """The text with the changes of all versions; None if some contradict each other."""
    lines = before.splitlines(keepends=True)
    edits: set[_Edit] = set()
    for version in versions:
        edits.update(_edits(lines, version.splitlines(keepends=True)))
    merged: list[bytes] = []
    position = 0
    last_start = -1
    for edit in sorted(edits):
        if edit.start < position or edit.start == last_start:
            return None
        merged += lines[position : edit.start]
        merged += edit.lines
        position = edit.end
        last_start = edit.start
    merged += lines[position:]
    return b"".join(merged)


def _edits(before: Sequence[bytes], after: Sequence[bytes]) -> Iterator[_Edit]:
    matcher = difflib.SequenceMatcher(None, before, after, autojunk=False)
    for kind, start, end, new_start, new_end in matcher.get_opcodes():
        if kind != "equal":
            yield _Edit(start, end, tuple(after[new_start:new_end]))

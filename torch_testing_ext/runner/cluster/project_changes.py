"""The files of the project that tests change on the nodes: found there, merged and written here."""

import difflib
import hashlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from torch_testing_ext._process.words import first_names

from .agent_messages import FileChanged

LEFT_OUT = {".git", ".hg", ".venv", "venv", "__pycache__", "node_modules", ".torch_testing_ext", ".pytest_cache"}
LARGEST = 256 << 20  # bytes of a file that comes back
_ACCEPTED = (".py", ".expect")


def matches(name: str, patterns: Sequence[str]) -> bool:
    """Whether a file, or a folder that it is in, matches a pattern, in which `*` stands for slashes, too."""
    return any(fnmatch(name, one) or fnmatch(name, f"{one.rstrip('/')}/*") for one in patterns)


# -- on a node


class ProjectWatch:
    """The state of a node's copy of the project before its tests, and the files that differ from it."""

    def __init__(self, root: Path, patterns: Sequence[str], accepts: bool):
        """`accepts`: tests rewrite expected texts, which come back by themselves."""
        self._root, self._patterns, self._accepts = root, patterns, accepts
        self._before = dict(self._states())

    def _states(self) -> Iterator[tuple[str, tuple[int, int]]]:
        for folder, folders, files in os.walk(self._root):
            folders[:] = [name for name in folders if name not in LEFT_OUT]
            for name in files:
                path = os.path.join(folder, name)
                try:
                    found = os.lstat(path)
                except OSError:
                    continue
                yield os.path.relpath(path, self._root), (found.st_mtime_ns, found.st_size)

    def changes(self) -> Iterator[FileChanged]:
        """The files of the project that have changed, and new files that are wanted."""
        after = dict(self._states())
        for name in sorted(self._before.keys() - after.keys()):
            yield FileChanged(name, "", None)
        for name, state in sorted(after.items()):
            wanted = self._is_wanted(name)
            path = self._root / name
            if state == self._before.get(name) or not (wanted or name in self._before) or not path.is_file():
                continue
            content = path.read_bytes() if state[1] <= LARGEST else b""
            digest = hashlib.sha256(content).hexdigest() if state[1] <= LARGEST else f"{state[1] >> 20} MiB"
            yield FileChanged(name, digest, content if wanted and state[1] <= LARGEST else None)

    def _is_wanted(self, name: str) -> bool:
        accepted = self._accepts and name.endswith(_ACCEPTED) and (name in self._before or name.endswith(".expect"))
        return accepted or matches(name, self._patterns)


# -- here


class _Version(NamedTuple):
    node: str
    content: bytes


class ComingBack:
    """The files that nodes have sent, to be written when all nodes have ended."""

    def __init__(self, root: Path, sent: Callable[[str], bytes | None], elsewhere: Mapping[str, Path]):
        """`sent`: a file as the nodes got it. `elsewhere`: folders of the project on nodes that are others here."""
        self._root, self._sent, self._elsewhere = root, sent, elsewhere
        self._versions: dict[str, list[_Version]] = {}
        self._stays: set[str] = set()

    def add(self, node: str, changed: FileChanged) -> None:
        before = self._sent(changed.name)
        if changed.digest == ("" if before is None else hashlib.sha256(before).hexdigest()):
            return  # it was only touched, or the set-up had created it and a test has removed it
        if changed.content is None:
            self._stays.add(changed.name)
        else:
            self._versions.setdefault(changed.name, []).append(_Version(node, changed.content))

    def write(self) -> tuple[list[str], list[str]]:
        """Write all that came. Returns the names of the files written, and warnings."""
        written, warnings = [], []
        for name, versions in sorted(self._versions.items()):
            try:
                written += self._write_one(name, versions)
            except (OSError, ValueError) as error:
                warnings.append(f"{name}, which tests have changed on nodes, stays as it is here: {error}")
        if stays := sorted(self._stays - self._versions.keys()):
            warnings.append(
                f"tests have changed files of the project on nodes, which stay as they are here: {first_names(stays)}; "
                "name them with --cluster-fetch"
            )
        self._versions, self._stays = {}, set()
        return written, warnings

    def _write_one(self, name: str, versions: Sequence[_Version]) -> list[str]:
        path, before = self._place(name), self._sent(name)
        contents = list(dict.fromkeys(version.content for version in versions))
        if before is None:  # the nodes have created it: one that differs gets the name of its node, too
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(contents[0])
            others = {version.node: version.content for version in versions if version.content != contents[0]}
            for node, content in others.items():
                path.with_name(f"{path.name}@{node}").write_bytes(content)
            shown = str(path.relative_to(self._root)) if path.is_relative_to(self._root) else str(path)
            return [shown, *(f"{shown}@{node}" for node in others)]
        here = path.read_bytes() if path.exists() else before
        merged = merge(before, [here, *contents])
        if merged is None:
            nodes = " and ".join(dict.fromkeys(version.node for version in versions))
            raise ValueError(f"its changes on {nodes}{'' if here == before else ' and here'} contradict each other")
        path.write_bytes(merged)
        return [name]

    def _place(self, name: str) -> Path:
        parts = PurePosixPath(name).parts
        if not parts or ".." in parts or name.startswith("/"):
            raise ValueError("it is not below the project")
        base, rest = (self._elsewhere[parts[0]], parts[1:]) if parts[0] in self._elsewhere else (self._root, parts)
        path = base.joinpath(*rest)
        if not path.parent.resolve().is_relative_to(base.resolve()) or path.is_symlink():
            raise ValueError("a symbolic link leads to it")
        return path


def merge(before: bytes, versions: Sequence[bytes]) -> bytes | None:
    """The text with the changes of all versions; None if some contradict each other."""
    lines = before.splitlines(keepends=True)
    edits: set[tuple[int, int, tuple[bytes, ...]]] = set()
    for version in versions:
        new = version.splitlines(keepends=True)
        codes = difflib.SequenceMatcher(None, lines, new, autojunk=False).get_opcodes()
        edits.update((start, end, tuple(new[a:b])) for kind, start, end, a, b in codes if kind != "equal")
    merged, at = [], 0
    last = -1
    for start, end, new_lines in sorted(edits):
        if start < at or start == last:
            return None
        merged += [*lines[at:start], *new_lines]
        at, last = end, start
    return b"".join([*merged, *lines[at:]])

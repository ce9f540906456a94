"""The files of the project that tests change on the nodes: found there, merged and written here."""

import difflib
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from torch_testing_ext._process.words import first_names

from .agent_messages import FileChanged

# Bytes of a file that comes back.
LARGEST_FILE = 256 << 20


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

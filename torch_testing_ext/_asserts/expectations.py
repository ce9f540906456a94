"""assertExpectedInline and assertExpected in ranks: each rank that calls them compares; what it got is settled by the
parent.

Ranks are processes of their own, and several of them must not rewrite one source file; nor may rank 0 of one test
after rank 0 of another, as it would not know of the lines that the other one has put in. So a rank only writes down
what it got, and the parent, which sees all tests of a file, rewrites it.
"""

from __future__ import annotations

import ast
import difflib
import fcntl
import inspect
import json
import os
import traceback
import unittest
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import expecttest

__unittest = True
__rank_frame__ = True

_SUFFIX = ".expected.rank"


# Instead of a line: the expectation is the whole file.
WHOLE_FILE = 0


@dataclass(frozen=True)
class Record:
    """One call in one rank. `turn`: which call of this line it was."""

    file: str
    line: int
    turn: int
    actual: str
    expected: str

    @property
    def where(self) -> str:
        return self.file if self.line == WHOLE_FILE else f"{self.file}:{self.line}"


def accepting() -> bool:
    """EXPECTTEST_ACCEPT=1 or --accept."""
    return bool(os.getenv("EXPECTTEST_ACCEPT")) or bool(expecttest.ACCEPT)


def file_of(test: unittest.TestCase, subname: str | None) -> Path:
    """Where assertExpected of this test finds what it expects: as in PyTorch, in `expect/` beside the test file."""
    source = inspect.getsourcefile(type(test))
    assert source is not None
    name = test.id().removeprefix(f"{type(test).__module__}.")
    return Path(source).resolve().parent / "expect" / f"{name}{f'-{subname}' if subname else ''}.expect"


def read_or_nothing(file: Path) -> str | None:
    try:
        return file.read_text()
    except FileNotFoundError:
        return None


def write(file: Path, text: str) -> None:
    """Make it what is expected from now on."""
    if read_or_nothing(file) == text:
        return
    file.parent.mkdir(exist_ok=True)
    file.write_text(text)
    print(f"Accepting new output in {file}")


def call_of(actual: str, expected: str, skip: int) -> Record:
    """`skip`: how many frames above this one's caller the expectation stands."""
    frame = traceback.extract_stack(limit=3 + skip)[0]
    assert frame.lineno is not None
    return Record(frame.filename, frame.lineno, 1, actual, expected)


class ExpectationRecorder:
    """A rank's side."""

    def __init__(self, file_name: str, rank: int):
        self._path = Path(f"{file_name}{_SUFFIX}{rank}")
        self._turns: dict[str, int] = {}

    def record(self, call: Record) -> None:
        turn = self._turns[call.where] = self._turns.get(call.where, 0) + 1
        with self._path.open("a") as log:
            log.write(json.dumps(asdict(replace(call, turn=turn))) + "\n")


def settle(file_name: str, world_size: int) -> str:
    """The parent's side. Returns how the ranks disagree, "" if they do not; when accepting, rewrites the source."""
    calls = _gather(file_name, world_size)
    disagreements = [text for ranks in calls if (text := _disagreement(ranks))]
    if disagreements or not accepting():
        return "\n\n".join(disagreements)
    return "\n\n".join(text for ranks in calls if (text := accept(ranks[min(ranks)])))


# What was put into a file: by the line as it was when the file was imported, lines added and text.
_Edits = dict[int, tuple[int, str]]
_edits: dict[str, _Edits] = {}  # by this process
# Where processes keep that in common which were all forked off the one that has imported the file.
history: Path | None = None


@contextmanager
def _edits_of(file: str) -> Iterator[_Edits]:
    """What was put into it so far, to be added to; nobody else rewrites it meanwhile."""
    if history is None:
        yield _edits.setdefault(file, {})
        return
    with history.open("a+") as kept:
        fcntl.flock(kept, fcntl.LOCK_EX)
        kept.seek(0)
        everything = json.loads(kept.read() or "{}")
        edits = {int(line): (added, text) for line, (added, text) in everything.get(file, {}).items()}
        yield edits
        kept.truncate(0)
        json.dump({**everything, file: edits}, kept)


def accept(record: Record) -> str:
    """Rewrite what is expected. Returns why it cannot be done.

    expecttest would too, but takes a line for one that it has written to when that one has only moved there.
    """
    if record.line == WHOLE_FILE:
        write(Path(record.file), record.actual)
        return ""
    if record.actual == record.expected:
        return ""
    with _edits_of(record.file) as edits:
        return _rewrite(record, edits)


def _rewrite(record: Record, edits: _Edits) -> str:
    if record.line in edits:
        return "" if edits[record.line][1] == record.actual else f"two calls of {record.where} want different texts"
    source = Path(record.file).read_text()
    line = record.line + sum(added for earlier, (added, _) in edits.items() if earlier < record.line)
    new, added = expecttest.replace_string_literal(source, line, _last_line(source, line), record.actual)
    if new == source:
        return f"the expectation at {record.where} cannot be rewritten: it must be a literal in triple quotes"
    Path(record.file).write_text(new)
    edits[record.line] = added, record.actual
    print(f"Accepting new output at {record.where}")
    return ""


def _last_line(source: str, line: int) -> int:
    """Of the statement that begins at `line`."""
    statements = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Expr))
    return max((node.end_lineno or line for node in statements if node.lineno == line), default=line)


def _gather(file_name: str, world_size: int) -> list[dict[int, Record]]:
    """The calls, each with what the ranks that made it got."""
    found: dict[tuple[str, int, int], dict[int, Record]] = {}
    for rank in range(world_size):
        for record in _read(Path(f"{file_name}{_SUFFIX}{rank}")):
            found.setdefault((record.file, record.line, record.turn), {})[rank] = record
    return list(found.values())


def _read(path: Path) -> Iterable[Record]:
    try:
        lines = path.read_text().splitlines()
    except FileNotFoundError:
        return []
    return [Record(**json.loads(line)) for line in lines]


def _disagreement(ranks: dict[int, Record]) -> str:
    first = min(ranks)
    other = next((rank for rank in ranks if ranks[rank].actual != ranks[first].actual), None)
    if other is None:
        return ""
    one, two = ranks[first].actual.splitlines(), ranks[other].actual.splitlines()
    diff = "\n".join(difflib.unified_diff(one, two, f"rank {first}", f"rank {other}", lineterm=""))
    alike = [rank for rank in ranks if ranks[rank].actual == ranks[first].actual]
    return f"ranks disagree at {ranks[first].where}; as rank {first} say ranks {alike} of {sorted(ranks)}:\n{diff}"

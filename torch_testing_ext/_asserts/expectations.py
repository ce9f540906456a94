"""assertExpectedInline and assertExpected in ranks: every rank compares, and only the parent rewrites expectations.

Several ranks must not rewrite the same source file. Nor can rank 0 of each test, as it does not know how many lines
earlier tests added. So a rank only records its actual text, and the parent, which sees all tests of a file, rewrites
the file.
"""

import ast
import difflib
import json
import os
import traceback
import unittest
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import expecttest

from torch_testing_ext._process import locked_file
from torch_testing_ext._process.logs import text_of
from torch_testing_ext._process.whole_files import source_file

__unittest = True

_SUFFIX = ".expected.rank"


WHOLE_FILE = 0  # instead of a line number, where the expectation is the whole file


@dataclass(frozen=True)
class Record:
    """One call of an assertion in one rank. `turn` counts the calls of this line."""

    file: str
    line: int
    turn: int
    actual: str
    expected: str

    @property
    def where(self) -> str:
        return self.file if self.line == WHOLE_FILE else f"{self.file}:{self.line}"


def accepting() -> bool:
    """Is EXPECTTEST_ACCEPT=1 or --accept set?"""
    return bool(os.getenv("EXPECTTEST_ACCEPT")) or bool(expecttest.ACCEPT)


def file_of(test: unittest.TestCase, subname: str | None) -> Path:
    """Return the file with the text that assertExpected expects: as in PyTorch, in `expect/` beside the test file."""
    source = source_file(type(test))
    assert source, f"{test.id()} is not defined in a file: there is no folder for its expectation"
    name = test.id().removeprefix(f"{type(test).__module__}.")
    return Path(source).resolve().parent / "expect" / f"{name}{f'-{subname}' if subname else ''}.expect"


def read_if_exists(file: Path) -> str | None:
    try:
        return file.read_text("utf-8", "surrogatepass")
    except FileNotFoundError:
        return None


def write(file: Path, text: str) -> None:
    if read_if_exists(file) == text:
        return
    file.parent.mkdir(exist_ok=True)
    file.write_text(text, "utf-8", "surrogatepass")
    print(f"Accepting new output in {file}")


def record_of_call(actual: str, expected: str, skip: int) -> Record:
    """Describe the current call; the expectation is `skip` frames above this function's caller."""
    frame = traceback.extract_stack(limit=3 + skip)[0]
    assert frame.lineno is not None
    return Record(frame.filename, frame.lineno, 1, actual, expected)


class ExpectationRecorder:
    """Records the calls of one rank in a file."""

    def __init__(self, file_name: str, rank: int):
        self._path = Path(f"{file_name}{_SUFFIX}{rank}")
        self._turns: dict[str, int] = {}

    def record(self, call: Record) -> None:
        turn = self._turns[call.where] = self._turns.get(call.where, 0) + 1
        with self._path.open("a") as log:
            log.write(json.dumps(asdict(replace(call, turn=turn))) + "\n")


def compare_ranks(file_name: str, world_size: int) -> str:
    """Describe how the ranks disagree, "" if they agree; when accepting, rewrite the source. For the parent."""
    calls = _gather(file_name, world_size)
    disagreements = [text for ranks in calls if (text := _disagreement(ranks))]
    if disagreements or not accepting():
        return "\n\n".join(disagreements)
    return "\n\n".join(text for ranks in calls if (text := accept(ranks[min(ranks)])))


# The edits of a file: from the line number at import to the number of lines added and the new text.
_Edits = dict[int, tuple[int, str]]
_edits: dict[str, _Edits] = {}  # made by this process
# A file in which processes share their edits, where they were all forked after the test file was imported.
history: Path | None = None


@contextmanager
def _edits_of(file: str) -> Iterator[_Edits]:
    """Yield the edits of a file so far, for the caller to add to, under a lock."""
    if history is None:
        yield _edits.setdefault(file, {})
        return
    with locked_file.opened(history, "a+") as kept:
        edits_by_file = json.loads(kept.read() or "{}")
        edits = {int(line): (added, text) for line, (added, text) in edits_by_file.get(file, {}).items()}
        yield edits
        kept.truncate(0)
        json.dump({**edits_by_file, file: edits}, kept)


def accept(record: Record) -> str:
    """Rewrite an expectation. Return the reason if that is impossible, else "".

    expecttest can rewrite, too, but after an edit it mistakes a line that has moved for one that it has written.
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
        return "" if edits[record.line][1] == record.actual else f"two calls at {record.where} have different texts"
    source = Path(record.file).read_text("utf-8")
    line = record.line + sum(added for earlier, (added, _) in edits.items() if earlier < record.line)
    new, added = expecttest.replace_string_literal(source, line, _last_line(source, line), record.actual)
    if new == source:
        return f"cannot rewrite the expectation at {record.where}: it must be a literal in triple quotes"
    Path(record.file).write_text(new, "utf-8")
    edits[record.line] = added, record.actual
    print(f"Accepting new output at {record.where}")
    return ""


def _last_line(source: str, line: int) -> int:
    """Return the last line of the statement that begins at `line`."""
    statements = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Expr))
    return max((node.end_lineno or line for node in statements if node.lineno == line), default=line)


def _gather(file_name: str, world_size: int) -> list[dict[int, Record]]:
    """Return the calls of all ranks, each as a dictionary from rank to record."""
    found: dict[tuple[str, int, int], dict[int, Record]] = {}
    for rank in range(world_size):
        for line in text_of(Path(f"{file_name}{_SUFFIX}{rank}")).splitlines():
            record = Record(**json.loads(line))
            found.setdefault((record.file, record.line, record.turn), {})[rank] = record
    return list(found.values())


def _disagreement(ranks: dict[int, Record]) -> str:
    first = min(ranks)
    other = next((rank for rank in ranks if ranks[rank].actual != ranks[first].actual), None)
    if other is None:
        return ""
    one, two = ranks[first].actual.splitlines(), ranks[other].actual.splitlines()
    diff = "\n".join(difflib.unified_diff(one, two, f"rank {first}", f"rank {other}", lineterm=""))
    alike = [rank for rank in ranks if ranks[rank].actual == ranks[first].actual]
    return f"ranks disagree at {ranks[first].where}; ranks {alike} of {sorted(ranks)} agree with rank {first}:\n{diff}"

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
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import expecttest

from torch_testing_ext._process import locks
from torch_testing_ext._process.logs import text_of
from torch_testing_ext._tests.source_files import source_file

__unittest = True

SUFFIX = ".expected.rank"
# Instead of a line number, where the expectation is the whole file.
WHOLE_FILE = 0


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
        if self.line == WHOLE_FILE:
            return self.file
        return f"{self.file}:{self.line}"


def accepting() -> bool:
    """Whether EXPECTTEST_ACCEPT=1 or --accept is set."""
    return bool(os.getenv("EXPECTTEST_ACCEPT")) or bool(expecttest.ACCEPT)


def file_of(test: unittest.TestCase, subname: str | None) -> Path:
    """Return the file with the text that assertExpected expects: as in PyTorch, in `expect/` beside the test file."""
    source = source_file(type(test))
    assert source, f"{test.id()} is not defined in a file: there is no folder for its expectation"
    name = test.id().removeprefix(f"{type(test).__module__}.")
    if subname:
        name += f"-{subname}"
    folder = Path(source).resolve().parent / "expect"
    return folder / f"{name}.expect"


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
        self._path = Path(f"{file_name}{SUFFIX}{rank}")
        self._turns: dict[str, int] = {}

    def record(self, call: Record) -> None:
        turn = self._turns.get(call.where, 0) + 1
        self._turns[call.where] = turn
        numbered = replace(call, turn=turn)
        with self._path.open("a") as log:
            log.write(json.dumps(asdict(numbered)) + "\n")


def compare_ranks(logs: Mapping[int, Path]) -> str:
    """Describe how the ranks disagree, "" if they agree; when accepting, rewrite the source. For the parent.

    `logs`: the files of the ranks that have recorded calls.
    """
    calls = _gather(logs)
    faults = [_disagreement(ranks) for ranks in calls]
    if not any(faults) and accepting():
        faults = [accept(ranks[min(ranks)]) for ranks in calls]
    return "\n\n".join(filter(None, faults))


# The edits of a file: from the line number at import to the number of lines added and the new text.
_Edits = dict[int, tuple[int, str]]
# Made by this process.
_edits: dict[str, _Edits] = {}
# A file in which processes share their edits, where they were all forked after the test file was imported.
history: Path | None = None


@contextmanager
def _edits_of(file: str) -> Iterator[_Edits]:
    """Yield the edits of a file so far, for the caller to add to, under a lock."""
    if history is None:
        yield _edits.setdefault(file, {})
        return
    with locks.open_locked(history, "a+") as stream:
        edits_by_file = json.loads(stream.read() or "{}")
        edits: _Edits = {}
        for line, (added, text) in edits_by_file.get(file, {}).items():
            edits[int(line)] = (added, text)
        yield edits
        edits_by_file[file] = edits
        stream.truncate(0)
        json.dump(edits_by_file, stream)


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
    """Rewrite the literal of a call, and add that to the edits. Returns the reason if it is impossible."""
    if record.line in edits:
        _, text = edits[record.line]
        return "" if text == record.actual else f"two calls at {record.where} have different texts"
    source = Path(record.file).read_text("utf-8")
    line = record.line
    for earlier, (added, _) in edits.items():
        if earlier < record.line:
            line += added
    new, added = expecttest.replace_string_literal(source, line, _last_line(source, line), record.actual)
    if new == source:
        return f"cannot rewrite the expectation at {record.where}: it must be a literal in triple quotes"
    Path(record.file).write_text(new, "utf-8")
    edits[record.line] = added, record.actual
    print(f"Accepting new output at {record.where}")
    return ""


def _last_line(source: str, line: int) -> int:
    """Return the last line of the statement that begins at `line`."""
    last = line
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and node.lineno == line:
            last = max(last, node.end_lineno or line)
    return last


# The records of one call, by rank.
_Call = dict[int, Record]


def _gather(logs: Mapping[int, Path]) -> list[_Call]:
    """Return the calls of all ranks."""
    calls: dict[tuple[str, int], _Call] = {}
    for rank, log in logs.items():
        for line in text_of(log).splitlines():
            record = Record(**json.loads(line))
            call = calls.setdefault((record.where, record.turn), {})
            call[rank] = record
    return list(calls.values())


def _disagreement(call: _Call) -> str:
    """Describe how the ranks disagree in a call; "" if they agree."""
    first = min(call)
    record = call[first]
    alike = [rank for rank in call if call[rank].actual == record.actual]
    others = [rank for rank in call if rank not in alike]
    if not others:
        return ""
    other = others[0]
    diff = difflib.unified_diff(
        record.actual.splitlines(),
        call[other].actual.splitlines(),
        f"rank {first}",
        f"rank {other}",
        lineterm="",
    )
    summary = f"ranks disagree at {record.where}; ranks {alike} of {sorted(call)} agree with rank {first}"
    return "\n".join((f"{summary}:", *diff))

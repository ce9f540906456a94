"""The file of a run: a zip with a header and the journal of each machine.

A file comes from a stranger, so it is read in memory and within limits; nothing is ever unpacked.
"""

from __future__ import annotations

import hashlib
import json
import os
import zipfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from torch_testing_ext import __version__
from torch_testing_ext._process import messages
from torch_testing_ext.runner.events import RunBegan
from torch_testing_ext.runner.options import StatusLevel, Verbosity
from torch_testing_ext.runner.report.journal import OF_UNITS, JournalError
from torch_testing_ext.runner.report.journal_reader import RecordedRun, run_of

RUN_FILE_FORMAT = "torch_testing_ext run file 1"
HEADER = "header.json"
JOURNAL = "runs/{}/journal.jsonl"
# Bytes of all that a file has, unpacked.
LARGEST = 512 * 1024 * 1024
MOST_RUNS = 1000
# The last second of the year 9999.
_LATEST = 253_402_300_799


class BadResults(Exception):
    """A file whose results cannot be used; the message is one line, with the name of the file."""


class TornFile(BadResults):
    """A run file without its end, such as one whose upload was cut off."""


class UnrelatedRuns(BadResults):
    """Files that do not belong together."""


@dataclass(frozen=True)
class ConsoleOfRun:
    """The console of a run: what `replay` prints it with."""

    verbosity: Verbosity = Verbosity.NORMAL
    durations: int | None = 5
    status_level: StatusLevel = StatusLevel.ALL
    coloured: bool = False
    columns: int | None = None
    # The file with all of a message, and the command that shows a failure.
    complete: str = ""
    show: str = ""


@dataclass(frozen=True)
class RunFacts:
    """Facts about a run that no event says."""

    # The digest of its journal: two files with the same one are the same run.
    digest: str = ""
    # The name of the project; empty if it has none.
    project: str = ""
    # The part that the run was of all tests, "2/4"; empty if it was all.
    shard: str = ""
    console: ConsoleOfRun = field(default_factory=ConsoleOfRun)
    # The names that selected tests.
    names: tuple[str, ...] = ()
    # A hash of the source of each test, by its id without parameters.
    bodies: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class FileHeader:
    """The first entry of the file."""

    format: str
    version: str
    runs: tuple[RunFacts, ...]
    # Shards that a merge did not have, in words.
    missing: tuple[str, ...] = ()


@dataclass(frozen=True)
class StoredRun:
    """A run as the file has it."""

    facts: RunFacts
    journal: bytes


@dataclass(frozen=True)
class RunFile:
    """The content of a run file: one run, or those that a merge has put together."""

    path: Path
    runs: tuple[StoredRun, ...]
    missing: tuple[str, ...] = ()

    def recorded(self, without: tuple[type, ...] = OF_UNITS) -> Iterator[tuple[RunFacts, RecordedRun]]:
        """Each run, with its events but for those `without` which its reader can do: at first, all without results."""
        for run in self.runs:
            try:
                recorded = run_of(run.journal, self.path, without=without)
            except JournalError as error:
                raise BadResults(str(error)) from None
            if not all(0 <= moment <= _LATEST for moment in _moments(recorded)):
                raise BadResults(f"{self.path} is damaged: a run of it began or ended at no date")
            yield run.facts, recorded


def _moments(run: RecordedRun) -> Iterator[float]:
    for event in run.events:
        if isinstance(event, RunBegan):
            yield event.clock
    for finished in run.summary.finished:
        for attempt in finished.attempts:
            yield attempt.began
            yield attempt.seconds


def digest_of(journal: bytes) -> str:
    return hashlib.sha256(journal).hexdigest()[:32]


def write_run_file(path: Path, runs: Sequence[StoredRun], missing: Sequence[str] = ()) -> None:
    """Write a run file: whole, or not at all."""
    header = FileHeader(RUN_FILE_FORMAT, __version__, tuple(run.facts for run in runs), tuple(missing))
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{os.urandom(4).hex()}")
    try:
        with zipfile.ZipFile(draft, "x", zipfile.ZIP_DEFLATED) as file:
            file.writestr(HEADER, json.dumps(messages.encode(header)))
            for number, run in enumerate(runs):
                file.writestr(JOURNAL.format(number), run.journal)
        os.replace(draft, path)
    except BaseException:
        with suppress(OSError):
            draft.unlink()
        raise


def is_run_file(path: Path) -> bool:
    """Whether the file begins as a zip does. Raises BadResults if it cannot be read."""
    try:
        with path.open("rb") as file:
            return file.read(2) == b"PK"
    except OSError as error:
        raise BadResults(f"{path}: {error.strerror}") from None


def read_run_file(path: Path) -> RunFile:
    """Read a run file. Raises BadResults."""
    try:
        with zipfile.ZipFile(path) as file:
            return _content(path, file)
    except OSError as error:
        raise BadResults(f"{path}: {error.strerror or error}") from None
    except (zipfile.BadZipFile, zlib.error, EOFError) as error:
        if not is_run_file(path):
            raise BadResults(f"{path} is not a run file: torchtest --run-file writes one") from None
        raise TornFile(f"{path} is torn: {error}") from None
    except (NotImplementedError, RuntimeError) as error:
        raise BadResults(f"{path} cannot be read: {error}") from None


def _content(path: Path, file: zipfile.ZipFile) -> RunFile:
    _check(path, file)
    try:
        data = json.loads(file.read(HEADER))
        written = data["format"]
    except (KeyError, ValueError, TypeError, RecursionError):
        raise BadResults(f"{path} is not a run file: torchtest --run-file writes one") from None
    if written != RUN_FILE_FORMAT:
        raise BadResults(f"{path} has the format {written!r}; this version reads {RUN_FILE_FORMAT!r}")
    try:
        header: FileHeader = messages.decode(FileHeader, data)
        runs = []
        for number, facts in enumerate(header.runs):
            journal = file.read(JOURNAL.format(number))
            if digest_of(journal) != facts.digest:
                raise BadResults(f"{path} is damaged: its journal {number} is not the one that was written")
            runs.append(StoredRun(facts, journal))
    except (KeyError, ValueError, TypeError, AttributeError):
        raise BadResults(f"{path} is damaged: its header does not fit its content") from None
    if not runs:
        raise BadResults(f"{path} has no run")
    return RunFile(path, tuple(runs), header.missing)


def _check(path: Path, file: zipfile.ZipFile) -> None:
    """Refuse what no run file has. zipfile reads no more of an entry than its size here says."""
    entries = file.infolist()
    if len(entries) > MOST_RUNS + 1:
        raise BadResults(f"{path} has {len(entries)} entries; a run file has at most {MOST_RUNS + 1}")
    size = sum(entry.file_size for entry in entries)
    if size > LARGEST:
        raise BadResults(f"{path} unpacks to {size // 2**20} MiB; a run file has at most {LARGEST // 2**20}")
    for entry in entries:
        inside = PurePosixPath(entry.filename.replace("\\", "/"))
        if inside.is_absolute() or ".." in inside.parts:
            raise BadResults(f"{path} has an entry that leaves the file: {entry.filename!r}")
        if entry.flag_bits & 1:
            raise BadResults(f"{path} is encrypted; no run file is")

"""Run files and JUnit XML of invented runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from xml.sax.saxutils import quoteattr

from kit.invented import make_attempt
from kit.invented_runs import run_events
from torch_testing_ext._tests.outcomes import TestOutcome
from torch_testing_ext.runner.events import Collected, RunBegan, RunEnded, Stopping
from torch_testing_ext.runner.model import FinishedTest, OmittedTest, RunHeader, Test, TestId
from torch_testing_ext.runner.options import Options
from torch_testing_ext.runner.report import journal, journal_writer
from torch_testing_ext.runner.run_files.run_file import RunFacts, StoredRun, digest_of, write_run_file
from torch_testing_ext.runner.run_files.writing import bodies_of


def id_of(name: str) -> TestId:
    file, *inner = name.split("::")
    return TestId(file, "::".join(inner[:-1]), inner[-1] if inner else "")


def passed(name: str, seconds: float = 0.1, outcome: TestOutcome = TestOutcome.PASSED, **more) -> FinishedTest:
    needs = {key: more.pop(key) for key in ("devices", "world_size") if key in more}
    test = Test(id_of(name), line=1, **needs)
    if outcome is TestOutcome.FLAKY:
        ends = (TestOutcome.FAILED, TestOutcome.PASSED)
        return FinishedTest(tuple(make_attempt(test, end, number=n, seconds=seconds) for n, end in enumerate(ends, 1)))
    return FinishedTest((make_attempt(test, outcome, seconds=seconds, **more),))


def skipped(name: str, why: str, **more) -> FinishedTest:
    return passed(name, 0.0, TestOutcome.SKIPPED, message=why, **more)


def failed(name: str, why: str = "AssertionError: 1 != 2", **more) -> FinishedTest:
    return passed(name, outcome=TestOutcome.FAILED, message=why, **more)


def stored_run(
    finished: Sequence[FinishedTest],
    *,
    left_out: Sequence[tuple[str, str]] = (),
    unfinished: Sequence[str] = (),
    stopped: str = "",
    host: str = "machine-a",
    shard: str = "",
    project: str = "p",
    root: Path | None = None,
    torn: bool = False,
    **run,
) -> StoredRun:
    """A run as a file has it, by way of its journal."""
    lost = tuple(Test(id_of(name)) for name in unfinished)
    with TemporaryDirectory() as folder:
        place = Path(folder, journal.NAME)
        writer = journal_writer.Journal(place, journal.header_of(Options()), print)
        writer.on_event(Collected(tuple(OmittedTest(id_of(name), why) for name, why in left_out)))
        for event in run_events(finished, **run):
            if isinstance(event, RunBegan):
                event = replace(event, tests=(*event.tests, *lost), header=RunHeader("torchtest", host=host))
            if isinstance(event, RunEnded):
                if stopped:
                    writer.on_event(Stopping(stopped))
                event = RunEnded(replace(event.summary, unfinished=lost))
            writer.on_event(event)
        content = place.read_bytes()
    if torn:
        content = content[: content.rindex(b'{"JournalEnd"') + 10]
    files = {each.test.id.file for each in finished}
    bodies = bodies_of(root, files) if root is not None else {}
    return StoredRun(RunFacts(digest_of(content), project, shard, bodies=bodies), content)


def run_file(path: Path, finished: Sequence[FinishedTest], **more) -> Path:
    write_run_file(path, [stored_run(finished, **more)])
    return path


def junit(path: Path, cases: Sequence[tuple[str, str, str]], suite: str = "") -> Path:
    """JUnit XML of cases: the class, the name, and what is in the element."""
    lines = [
        f"<testcase classname={quoteattr(cls)} name={quoteattr(name)} time='0.1'>{inside}</testcase>"
        for cls, name, inside in cases
    ]
    path.write_text(f"<testsuites><testsuite name='pytest' {suite}>{''.join(lines)}</testsuite></testsuites>")
    return path

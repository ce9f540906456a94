"""The report that writes a run file. It comes in by the door for reports, as any package's report does."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path

from torch_testing_ext._process.project_folder import project_root
from torch_testing_ext._tests.outcomes import TestOutcome
from torch_testing_ext.runner import run_again
from torch_testing_ext.runner.events import AttemptEnded, Collected, Event, Reporter, RunBegan, RunEnded
from torch_testing_ext.runner.model import Attempt
from torch_testing_ext.runner.options import Options
from torch_testing_ext.runner.options.default_folders import table, toml_content
from torch_testing_ext.runner.report import journal, journal_writer
from torch_testing_ext.runner.report.report_request import ReportRequest

from .definitions import defined_in
from .run_file import ConsoleOfRun, RunFacts, StoredRun, digest_of, write_run_file


def run_file(request: ReportRequest) -> Reporter | None:
    """The run as one file, with `--run-file`."""
    options = request.options
    if options.run_file is None:
        return None
    root = options.drop_in_root or project_root(Path.cwd())
    return RunFileReport(options.run_file, options, root, request)


@dataclass
class RunFileReport:
    """Keeps the journal of a run, and writes it into a file at the end. A failure to do so causes a warning."""

    path: Path
    options: Options
    root: Path
    request: ReportRequest
    _files: set[str] = field(default_factory=set)
    _folder: tempfile.TemporaryDirectory[str] | None = None
    _journal: journal_writer.Journal | None = None

    def on_event(self, event: Event) -> None:
        if self._journal is None:
            self._folder = tempfile.TemporaryDirectory(prefix="torchtest-run-file-")
            place = Path(self._folder.name, journal.NAME)
            self._journal = journal_writer.Journal(place, journal.header_of(self.options), self.request.warn)
        match event:
            case Collected(left_out):
                self._files.update(each.test.file for each in left_out)
            case RunBegan():
                self._files.update(test.id.file for test in event.tests)
            case AttemptEnded(attempt):
                event = replace(event, attempt=self._kept(attempt))
        self._journal.on_event(event)
        if isinstance(event, RunEnded):
            self._write(self._journal.path)

    def _kept(self, attempt: Attempt) -> Attempt:
        """The attempt, without the logs of one that is fine: few read them, and they are most of a file."""
        fine = attempt.outcome.counts_as is TestOutcome.PASSED and attempt.outcome is not TestOutcome.LEAKED
        return replace(attempt, output="", ranks=()) if fine and not self.options.run_file_logs else attempt

    def _write(self, place: Path) -> None:
        try:
            content = place.read_bytes()
            write_run_file(self.path, [StoredRun(self._facts(content), content)])
        except OSError as error:
            self.request.warn(f"{self.path} could not be written ({error}); the outcome of the run is not affected")
        finally:
            if self._folder is not None:
                self._folder.cleanup()

    def _facts(self, content: bytes) -> RunFacts:
        options, request = self.options, self.request
        part = options.shard
        complete = next((str(file) for file in (options.html, options.results, options.junitxml) if file), "")
        console = ConsoleOfRun(
            options.verbosity,
            options.durations,
            options.status_level,
            request.coloured,
            request.columns,
            complete,
            run_again.show_command(options),
        )
        return RunFacts(
            digest_of(content),
            name_of_project(self.root),
            f"{part.index}/{part.count}" if part else "",
            console,
            (*options.names, *options.include),
            bodies_of(self.root, self._files),
        )


def name_of_project(root: Path) -> str:
    """The name that the project has given itself; empty if it has none."""
    name = table(toml_content(root / "pyproject.toml"), ("project",)).get("name", "")
    return name if isinstance(name, str) else ""


def bodies_of(root: Path, files: Iterable[str]) -> dict[str, str]:
    """A hash of the source of each test in these files, by which a renamed one is known again."""
    found = {}
    for file in sorted(files):
        for test in defined_in(root, file).tests:
            found[str(test.id)] = test.body
    return found

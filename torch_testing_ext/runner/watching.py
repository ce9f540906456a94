"""`--watch`: runs affected tests after each save, each run in a fork of this process, which draws the page.

The page polls the files that tests have read by `stat`. That only says when to run: which tests run is decided by the
records of what each has read, as for --affected.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import select
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Set
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING, NoReturn

from torch_testing_ext._process import file_reads, system
from torch_testing_ext._process.channels import Channel, socket_pair
from torch_testing_ext.runner.engine.signals_and_keys import keys
from torch_testing_ext.runner.report.console_style import is_terminal
from torch_testing_ext.runner.scheduling.affected_tests import Affected
from torch_testing_ext.runner.scheduling.earlier_runs import EarlierRuns
from torch_testing_ext.runner.scheduling.finding_files import test_files
from torch_testing_ext.runner.warm.stamps import Stamp, stamp

from . import chosen_files, run_session
from .events import Event, RunEnded
from .model import ExitCode
from .options import Options, Rerun, UsageError, Warm
from .options.default_folders import default_folders

if TYPE_CHECKING:
    from torch_testing_ext.runner.report.watch_page import WatchPage


LOOK_AT_FILES = 0.1
# A save may be several changes.
SETTLE = 0.02
# Runs a function as the command line does, and returns the exit code.
Guard = Callable[[Callable[[], int]], int]


def watch(options: Options, root: Path, guard: Guard) -> int:
    """Run until the user quits. Returns the exit code of the last run that has ended."""
    if options.takes_terminal or options.cluster is not None:
        other = "--cluster" if options.cluster is not None else "--pdb"
        raise UsageError(f"--watch and {other} cannot be combined. Leave out one of them")
    if not is_terminal(sys.stdout, os.environ):
        raise UsageError("--watch draws a page, and stdout is no terminal: run it in one")
    if importlib.util.find_spec("rich") is None:
        raise UsageError("--watch needs rich, which is not installed: pip install rich")
    from torch_testing_ext.runner.report.watch_page import WatchPage

    options = dataclasses.replace(options, warm=Warm.START if options.warm is Warm.AUTO else options.warm)
    # Or UsageError.
    chosen_files.Chosen.of(options, root, Path.cwd())
    with ExitStack() as owner:
        output = owner.enter_context(tempfile.TemporaryFile())
        page = owner.enter_context(WatchPage(options, output))
        terminal = owner.enter_context(keys())
        return Watcher(options, root, guard, page, output, terminal).serve()


class Saves:
    """Finds saves of files, and of the names in folders."""

    def __init__(self) -> None:
        self._seen: dict[str, tuple[Stamp | None, str]] = {}
        # A path had been saved before it was watched.
        self._has_missed = False

    def watch(self, read: Mapping[str, Set[str]]) -> None:
        """Watch these paths. A new one with other contents than those that tests have `read` was saved meanwhile."""
        seen = {path: self._seen.get(path) or _state(path) for path in read}
        for path in seen.keys() - self._seen.keys():
            now, contents = seen[path]
            self._has_missed |= now is not None and not read[path] <= {contents}
        self._seen = seen

    def __len__(self) -> int:
        return len(self._seen)

    def found(self) -> bool:
        """Whether anything has other contents than at the last call."""
        has_changed, self._has_missed = self._has_missed, False
        for path, (before, contents) in self._seen.items():
            if stamp(path.rstrip("*?")) != before:
                self._seen[path] = _state(path)
                if self._seen[path][1] != contents:
                    has_changed = True
        return has_changed


def _state(path: str) -> tuple[Stamp | None, str]:
    return stamp(path.rstrip("*?")), file_reads.hash_of(path)


class Watcher:
    """Starts runs, and gives what happens to the page."""

    def __init__(
        self,
        options: Options,
        root: Path,
        guard: Guard,
        page: WatchPage,
        output: IO[bytes],
        terminal: int | None,
    ):
        self._options = options
        self._root = root
        self._guard = guard
        self._page = page
        self._output = output
        self._terminal = terminal
        self._saves = Saves()
        # The pid of the run.
        self._pid = 0
        self._events: Channel[Event] | None = None
        # Something was saved during the run.
        self._again = False
        self._quits = False
        self._code = 0

    def serve(self) -> int:
        self._begin(affected=True)
        with suppress(KeyboardInterrupt):
            while not self._quits:
                self._step()
        self._end()
        return self._code

    def _step(self) -> None:
        listened = [source for source in (self._terminal, self._events) if source is not None]
        ready, _, _ = select.select(listened, [], [], LOOK_AT_FILES)
        if self._terminal is not None and self._terminal in ready:
            self._press(os.read(self._terminal, 64))
        if self._events is not None and self._events in ready:
            self._receive(self._events)
        if self._saves.found():
            self._on_save()
        self._page.refresh()

    def _on_save(self) -> None:
        """Begin a run when all is saved; one that runs ends first."""
        time.sleep(SETTLE)
        while self._saves.found():
            time.sleep(SETTLE)
        if self._pid:
            self._again = True
            os.kill(self._pid, signal.SIGINT)
        else:
            self._begin(affected=True)

    def _press(self, typed: bytes) -> None:
        """Do what the keys mean."""
        # The terminal was closed.
        if not typed:
            self._quits = True
        for key in typed.decode(errors="replace"):
            match key:
                case "q":
                    self._quits = True
                case "a" | "f" if not self._pid:
                    self._begin(failed=key == "f")
                case "w" if self._pid:
                    os.kill(self._pid, signal.SIGUSR1)
                case "l":
                    self._page.show_output()
                case _:
                    self._page.show_page()

    # -- a run

    def _begin(self, affected: bool = False, failed: bool = False) -> None:
        if failed and not self._page.failures:
            return self._page.say("no test has failed")
        rerun = Rerun.LAST_FAILED if failed else self._options.rerun
        options = dataclasses.replace(self._options, affected="HEAD" if affected else None, rerun=rerun)
        self._page.begin()
        ours, theirs = socket_pair()
        self._events = Channel(ours, Event)
        parent = os.getpid()
        self._pid = os.fork()
        if self._pid == 0:
            ours.close()
            self._run(options, Channel(theirs, Event), parent)
        theirs.close()

    def _run(self, options: Options, events: Channel[Event], parent: int) -> NoReturn:
        """Be the process of a run."""
        code = int(ExitCode.OUR_ERROR)
        try:
            system.die_with(parent, signal.SIGTERM)
            self._output.truncate(0)
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            os.dup2(self._output.fileno(), 1)
            os.dup2(1, 2)
            os.lseek(1, 0, os.SEEK_SET)
            sender = _Sender(events, {"COLUMNS": str(self._page.width)})
            code = self._guard(partial(run_session.run, options, self._root, sender))
            sys.stdout.flush()
        finally:
            os._exit(code)

    def _receive(self, events: Channel[Event]) -> None:
        try:
            for event in events.receive():
                self._page.on_event(event)
        except EOFError:
            events.close()
            self._ended()

    def _ended(self) -> None:
        _, status = os.waitpid(self._pid, 0)
        self._code = os.waitstatus_to_exitcode(status)
        self._pid = 0
        self._events = None
        self._watch_files()
        self._page.end(self._code, len(self._saves))
        if self._again:
            self._again = False
            self._begin(affected=True)

    def _watch_files(self) -> None:
        """Watch everything that tests have read, and the folders in which new test files may appear."""
        affected = Affected(self._options, self._root, EarlierRuns(self._options))
        files = test_files(self._options, self._root, Path.cwd())
        folders = {os.path.dirname(self._root / file) for file in files}
        folders.update(str(place) for place in self._options.tests or default_folders(self._root))
        paths = affected.paths(files)
        for folder in folders:
            paths.setdefault(f"{folder}{file_reads.SEARCHED}", set())
        self._saves.watch(paths)

    def _end(self) -> None:
        """End the run, if there is one, as Ctrl-C does."""
        if self._pid:
            with suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGINT)
            os.waitpid(self._pid, 0)


@dataclasses.dataclass
class _Sender:
    """Sends the events of a run to the page."""

    events: Channel[Event]
    environ: Mapping[str, str]

    def on_event(self, event: Event) -> None:
        if isinstance(event, RunEnded):
            event = RunEnded(dataclasses.replace(event.summary, finished=(), unfinished=()))
        self.events.send(event)

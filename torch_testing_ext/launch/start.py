"""The start of ranks: one fork server for this process, made when first needed, and its runs.

The fork server is a fork of this process, if that is safe; else it is a new interpreter, whose ranks import the test's
module; else each rank is a new interpreter. TORCH_TESTING_EXT_START overrides the choice.
"""

from __future__ import annotations

import atexit
import itertools
import os
import pickle
import shutil
import signal
import sys
import tempfile
import threading
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

from torch_testing_ext._process import fork_safety, system, temporary_folders, words
from torch_testing_ext._tests import system_refusals
from torch_testing_ext._tests.notes import warn_user
from torch_testing_ext.launch import launched_by
from torch_testing_ext.launch.fork_server_client import CannotStart, ForkServerClient, Run, ServerUnfit
from torch_testing_ext.launch.fork_server_messages import Launch, Preload, StartMethod
from torch_testing_ext.launch.jobs import Job
from torch_testing_ext.launch.named import Named
from torch_testing_ext.launch.start_settings import LOGS, START

# Keeps these frames out of tracebacks: the message is complete.
__unittest = True
# The same in pytest.
__tracebackhide__ = True


class Launcher:
    """Starts the ranks of this process: it owns the fork server, and the directory that holds the files of its runs."""

    def __init__(self, directory: Path | None = None, hints: Iterable[str] = (), inherits: bool = True):
        """`directory` belongs to this process alone and is removed when it ends; None makes one when needed.

        `hints`: modules to preload. Unless it `inherits`, the ranks have nothing of this process: their fork server is
        a new interpreter.
        """
        self.owner = os.getpid()
        self.server: ForkServerClient | None = None
        # Modules that ranks had to import themselves. A runner preloads them in the process that forks this one.
        self.preload_hints = dict.fromkeys(hints)
        self._directory = directory
        # Whether another process than a fork server removes the directory if this one is killed.
        self._has_keeper = directory is not None
        self._keeper = ExitStack()
        self._inherits = inherits
        # The setting under which the server was made.
        self._wanted = ""
        self._warned: set[tuple[str, str]] = set()
        # This process could not be forked as it uses an accelerator.
        self._in_use = False
        self._numbers = itertools.count()

    def session_directory(self) -> Path:
        """The directory of this process's runs. Removed at exit, or by another process of ours if we are killed."""
        with _refusals():
            if self._directory is None:
                self._directory = Path(tempfile.mkdtemp(prefix="torch_testing_ext_"))
                if launched_by.this_launch() is not None:
                    # It has no fork server, is killed when another rank fails, and may end without exit handlers.
                    self.keep_directory()
            self._directory.mkdir(parents=True, exist_ok=True)
        return self._directory

    def keep_directory(self) -> None:
        """Have the directory removed also if this process is killed while it has no fork server."""
        directory = self.session_directory()
        if not self._has_keeper:
            with _refusals():
                self._keeper.enter_context(temporary_folders.removed_if_killed(directory))
            self._has_keeper = True

    def drop_empty_directory(self) -> None:
        """Remove the directory if no run has files there, and no process would remove it if this one was killed."""
        has_server = any(own.server is not None for own in _of_this_process())
        if self._directory is not None and not self._has_keeper and not has_server:
            with suppress(OSError):
                self._directory.rmdir()
                self._directory = None

    def close_at_exit(self) -> None:
        if self.owner == os.getpid():
            self.close()

    def close(self) -> None:
        """End the server and remove the session's files. The next launch makes new ones."""
        self._discard_server()
        self._keeper.close()
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)
            self._directory = None
            self._has_keeper = False

    def launch(self, job: Job) -> Run:
        """Start the ranks of a job. Raises CannotStart."""
        wanted = _wanted_start(job)
        try:
            return self.launch_on(self._get_server(job.names[-1], wanted), job)
        except ServerUnfit:
            self._discard_server()
        # Ranks of the failed attempt may have left files there, a rendezvous store for one.
        _empty(job.directory)
        try:
            return self.launch_on(self._get_server(job.names[-1], wanted), job)
        except ServerUnfit as why:
            raise CannotStart(f"two attempts to start the ranks failed: {why}") from None

    def launch_on(self, server: ForkServerClient, job: Job) -> Run:
        job = replace(job, inherits=server.method is StartMethod.FORK)
        run = Run(next(self._numbers), job, server)
        server.runs[run.number] = run
        try:
            server.send(Launch(run.number, pickle.dumps(run.job)))
            run.wait_for_start(lambda: bool(run.pids))
            if run.lost:
                raise ServerUnfit(run.lost)
        except BaseException:
            run.signal(signal.SIGKILL)
            finish(run)
            raise
        return run

    # -- the server

    def prepare(self, subject: Named, imports: tuple[str, ...]) -> None:
        """Fork the server now if it would be forked at the first launch, and have it import these modules."""
        if self.server is not None:
            return
        self.preload_hints.update(dict.fromkeys(imports))
        wanted = START.value()
        if _best_methods(wanted)[0] is StartMethod.FORK:
            self.server, _ = self.try_method(StartMethod.FORK, subject)
            self._wanted = wanted
            if self.server is not None and imports:
                self.server.send(Preload(imports, at_once=True))

    def _get_server(self, subject: Named, wanted: str) -> ForkServerClient:
        if self.server is not None and (self.server.unusable or not self._suits(self.server, wanted)):
            self._discard_server()
        if self.server is None:
            self.server = self._make_server(wanted, subject)
            self._wanted = wanted
        return self.server

    def _suits(self, server: ForkServerClient, wanted: str) -> bool:
        """Whether this setting would choose such a server. After another, a better method may be possible again."""
        first, *others = _METHODS_OF[wanted]
        return server.method is first or (wanted == self._wanted and server.method in others)

    def _discard_server(self) -> None:
        if self.server is not None:
            self.server.close()
            self.server = None

    def _make_server(self, wanted: str, subject: Named) -> ForkServerClient:
        reasons: list[str] = []
        for method in _best_methods(wanted):
            if method is not StartMethod.FORK and "<locals>" in subject.qualname:
                # No other interpreter has this class.
                continue
            if method is StartMethod.SPAWN and reasons:
                self._warn_once("ranks are started as new interpreters, which takes seconds", "; ".join(reasons))
            server, unusable = self.try_method(method, subject)
            if server is not None:
                if method is StartMethod.FORK_FRESH and self._in_use and reasons:
                    slow = "ranks are forked from a new interpreter, which takes seconds to start"
                    self._warn_once(slow, reasons[0])
                return server
            reasons.append(f"{_SUBJECT_OF[method]}: {unusable}")
        return _explain_failure(wanted, subject, reasons)

    def try_method(
        self, method: StartMethod, subject: Named, inherited: Any = None
    ) -> tuple[ForkServerClient | None, str]:
        """Make a server by this method. Returns it, or the reason why there is none."""
        why_not = self._why_not_forked() if method is StartMethod.FORK else None
        if why_not is not None:
            return None, why_not
        with _refusals("the process that starts ranks could not be started"):
            # The one with the files of the runs, whichever launcher starts their ranks.
            server = ForkServerClient(method, subject, launcher().session_directory(), inherited)
        try:
            unsafe = server.wait_until_ready()
        except BaseException:
            # For one, Ctrl-C.
            server.close()
            raise
        if unsafe is None:
            return server, ""
        server.close()
        if method is StartMethod.FORK:
            self._in_use = server.accelerator_in_use
        return None, unsafe

    def _why_not_forked(self) -> str | None:
        if not self._inherits:
            return "its ranks must not inherit from it"
        return fork_safety.of_process.was_forked() or fork_safety.prepare_to_fork()

    def _warn_once(self, text: str, reason: str) -> None:
        if (text, reason) not in self._warned:
            self._warned.add((text, reason))
            warn_user(text, reason)

    # -- preload hints

    def add_preload_hints(self, run: Run, modules: tuple[str, ...]) -> None:
        """Have modules that the ranks of this run had to import themselves preloaded for the next ranks."""
        self.preload_hints.update(dict.fromkeys(modules))
        if modules and not run.owns_server:
            run.server.send(Preload(modules))


# The start methods that each setting tries, in order.
_METHODS_OF = {
    "auto": (StartMethod.FORK, StartMethod.FORK_FRESH, StartMethod.SPAWN),
    "fork": (StartMethod.FORK, StartMethod.FORK_FRESH),
    "fork-fresh": (StartMethod.FORK_FRESH,),
    "spawn": (StartMethod.SPAWN,),
}


_SUBJECT_OF = {
    StartMethod.FORK: "this process cannot be forked",
    StartMethod.FORK_FRESH: "neither can a new interpreter",
    StartMethod.SPAWN: "an interpreter that starts ranks failed",
}


def _best_methods(wanted: str) -> tuple[StartMethod, ...]:
    """The start methods to try here, in order: a process that has made groups is forked only if no other can be."""
    methods = _METHODS_OF[wanted]
    if StartMethod.FORK not in methods or "torch" not in sys.modules:
        return methods
    from torch_testing_ext._torch.groups import process_groups

    if not process_groups.made_groups_before():
        return methods
    return (StartMethod.FORK_FRESH, StartMethod.FORK, *methods[2:])


def _explain_failure(wanted: str, subject: Named, reasons: list[str]) -> NoReturn:
    if "<locals>" in subject.qualname:
        why = "; ".join(reasons) or f"TORCH_TESTING_EXT_START={wanted}, or --sanitize=hash"
        raise CannotStart(
            f"{subject.qualname} is defined inside a function, so its ranks must be forked from this process: {why}"
        )
    if wanted.startswith("fork"):
        raise CannotStart(f"TORCH_TESTING_EXT_START={wanted}, but ranks cannot be forked: {'; '.join(reasons)}")
    raise CannotStart("; ".join(["the process that starts ranks could not be started", *reasons]))


def _empty(directory: Path) -> None:
    for entry in directory.iterdir():
        with suppress(OSError):
            entry.unlink()


# The servers of each thread: a server ends with the thread that has made it, and its loop serves no other.
_own = threading.local()


def launcher(inherits: bool = True) -> Launcher:
    """Return the launcher of this thread for ranks that inherit from it, or for those that do not.

    A child that a test forked has a copy of its parent's launcher, but not the processes: it gets its own launcher.
    """
    launchers: dict[bool, Launcher] = _own.__dict__.setdefault("launchers", {})
    known = launchers.get(inherits)
    if known is not None and known.owner == os.getpid():
        return known
    hints = () if known is None else known.preload_hints
    own = launchers[inherits] = Launcher(hints=hints, inherits=inherits)
    atexit.register(own.close_at_exit)
    return own


def _of_this_process() -> list[Launcher]:
    """The launchers of this thread, without those that this process has as copies of its parent's."""
    launchers: dict[bool, Launcher] = _own.__dict__.get("launchers", {})
    return [own for own in launchers.values() if own.owner == os.getpid()]


def work_in(directory: Path) -> None:
    """Keep the files of this process's runs in `directory`, which holds nothing else and is removed with them."""
    _own.launchers = {True: Launcher(directory, launcher().preload_hints)}


def launch(job: Job) -> Run:
    return launcher().launch(job)


def _wanted_start(job: Job) -> str:
    """Return the start method that the user wants: only new interpreters differ in hash."""
    return "spawn" if job.differs_in_hash else START.value()


def launch_fresh(job: Job) -> Run:
    """Start the ranks of a job in the state of a new interpreter, which imports torch once. Raises CannotStart."""
    return launcher(inherits=False).launch(job)


_NEEDS_LINUX = (
    "these ranks are forks of this process, which needs Linux; the test classes of "
    "torch_testing_ext.common_distributed start new interpreters"
)


def launch_from_here(job: Job, inherited: Any = None) -> Run:
    """Start the ranks of a job, forked from this process as it is now. Their fork server ends with them.

    `inherited` is an object of this process that they get in their contexts.

    Raises CannotStart if it is not safe to fork, or if the setting wants another start method.
    """
    if not system.CAN_FORK:
        raise CannotStart(_NEEDS_LINUX, is_refused=True)
    wanted = _wanted_start(job)
    own = launcher()
    server = None
    if StartMethod.FORK in _METHODS_OF[wanted]:
        server, unusable = own.try_method(StartMethod.FORK, job.names[-1], inherited)
        why_not = f"but that is not safe: {unusable}"
    elif job.differs_in_hash:
        why_not = "but --sanitize=hash needs new interpreters"
    else:
        why_not = f"but TORCH_TESTING_EXT_START={wanted}"
    if server is None:
        raise CannotStart(f"these ranks inherit the state of this process, so they must be forked, {why_not}")
    try:
        run = own.launch_on(server, job)
        run.owns_server = True
        return run
    except ServerUnfit as why:
        server.close()
        raise CannotStart(f"the ranks could not be started: {why}") from None
    except BaseException:
        server.close()
        raise


def prepare(subject: Named, imports: tuple[str, ...] = ()) -> None:
    """Fork the fork server now, if that is possible: the ranks of such a job have the state of the process as it is.

    Does nothing where there is one, or where ranks have to be started in another way. A server only knows things that
    were named before it was forked. `imports`: modules that the ranks will need. Raises CannotStart.
    """
    launcher().prepare(subject, imports)


def close() -> None:
    """End the fork servers and their ranks, and remove their files. The next launch makes new ones."""
    for own in _of_this_process():
        own.close()


def keep_directory() -> None:
    """Have the files of this process's runs removed also if it is killed while it has no fork server."""
    launcher().keep_directory()


def preload_hints() -> tuple[str, ...]:
    """Return the modules of torch that earlier ranks of this process had to import by themselves."""
    return tuple(launcher().preload_hints)


def finish(run: Run) -> None:
    """Forget a run that is over, and end a server that has started no other."""
    run.server.runs.pop(run.number, None)
    if run.owns_server:
        run.server.close()


# How many directories of a name this process has made.
_directories: dict[Path, int] = {}


def new_directory(name: str) -> Path:
    """A directory for one run's files: kept below TORCH_TESTING_EXT_LOGS if that is set.

    No name is used twice: an object of an earlier test that still exists, such as a store, may remove its file late.
    """
    parent = LOGS.value() or launcher().session_directory()
    safe = words.file_name(name)[-150:]
    with _refusals():
        parent.mkdir(parents=True, exist_ok=True)
        for number in itertools.count(_directories.get(parent / safe, 0)):
            directory = parent / (safe if number == 0 else f"{safe}.{number}")
            with suppress(FileExistsError):
                directory.mkdir()
                _directories[parent / safe] = number + 1
                return directory
    raise AssertionError


@contextmanager
def _refusals(what: str = "the folder for the files of ranks cannot be made") -> Iterator[None]:
    """Raise CannotStart with what to do where the system refuses something."""
    try:
        yield
    except OSError as error:
        raise CannotStart(f"{what}: {system_refusals.why_refused(error)}", is_refused=True) from None


def discard(directory: Path, may_stay: bool = True) -> None:
    """Remove the directory of a run, unless the user keeps the files. `may_stay`: it is one that users keep."""
    if LOGS.value() is None or not may_stay:
        shutil.rmtree(directory, ignore_errors=True)
        launcher().drop_empty_directory()

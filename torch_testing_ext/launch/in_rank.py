"""A rank: its job and context, the process that does it, its stops for the user, the collectives that it leaves."""

from __future__ import annotations

import _thread
import faulthandler
import functools
import importlib
import importlib.util
import itertools
import os
import pickle
import select
import signal
import socket
import sys
import traceback
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from torch_testing_ext._collectives.blocked.rank_state import RankState
from torch_testing_ext._collectives.records.raw_records import pack_record
from torch_testing_ext._collectives.sanitizer.sanitizer_kinds import AGAIN, SanitizeKind
from torch_testing_ext._process import importing, messages, running_coverage, sessions, signals, system
from torch_testing_ext._process.importing import ModulePlace
from torch_testing_ext._process.stacks import write_on_request, write_stacks
from torch_testing_ext._process.terminal import UserTerminal
from torch_testing_ext._process.user_commands import working_folder
from torch_testing_ext.faults import FaultPlan

from . import own_report, terminal_turns
from .own_report import ERROR_EXIT_CODE, AccountFile, AccountWriter, account_of, now
from .terminal_turns import StopContext, open_fifo

# --------------------------------------------------------------------------------------------------------------------
# The context of a rank: everything that its process has to know of the run, made by the launch layer for the body.


@dataclass
class RankContext:
    """One rank of a run. A persistent rank runs many bodies in one context."""

    rank: int
    world_size: int
    # The files of the run, the same for all ranks.
    directory: Path
    account: AccountWriter
    # Of torch, random and NumPy; None: as in this process.
    seed: int | None = None
    # gloo's groups end with the process.
    fast_exit: bool = True
    # The user debugs one of the ranks: no wait has a time-out.
    is_debugged: bool = False
    # The object that the launching process has handed to the ranks that it forks.
    inherited: Any = None
    # The groups that it creates: see _testing/bases/group_creation.py.
    group_creation: Any = None
    # How many processes of this rank have died by faults of the test before.
    incarnation: int = 0
    pid: int = field(default_factory=os.getpid)

    def enter(self) -> None:
        """Make this the context of the process, until it ends."""
        global _current
        _current = self

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Make this the context of the process for a while: a launcher's process is a rank in each of its tests."""
        global _current
        before, _current = _current, self
        try:
            yield
        finally:
            _current = before


_current: RankContext | None = None


def current_context() -> RankContext | None:
    """Return the context of the rank that this process is, or that has forked it; None if there is none."""
    return _current


def context_here() -> RankContext | None:
    """Return the context of the rank that this process is; None also in a process that a rank's test has forked."""
    return _current if _current is not None and _current.pid == os.getpid() else None


# --------------------------------------------------------------------------------------------------------------------
# Jobs: the description of a run, which the parent sends to the process that starts the ranks.


class UnknownName(Exception):
    """A name that does not exist in this process, or does not mean the same object as in the sender."""


# Keeps modules alive: a module without references loses its globals, and code of it may still be running.
_retired_mains: list[ModuleType] = []


# Every class and function that was ever named, by a unique number that holds in processes forked from this one, too.
# Neither a name nor an id would do: a class defined in a function cannot be found by its name, and another class may
# get the name and the id of one that is gone.
_counter = itertools.count()
_numbers: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
_things: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()


@dataclass(frozen=True)
class Named:
    """A class or function by name, with the file of its module for an interpreter that has not imported it."""

    module: str
    qualname: str
    file: str | None
    number: int
    # The full name of the main module if it was started by `python -m`.
    main: str = ""

    @classmethod
    def of(cls, thing: Any) -> Named:
        number = _numbers.setdefault(thing, next(_counter))
        _things[number] = thing
        module = sys.modules.get(thing.__module__)
        file = getattr(module, "__file__", None)
        absolute = file and str(Path(file).absolute())
        main = ""
        if thing.__module__ == "__main__":
            spec = getattr(module, "__spec__", None)
            main = getattr(spec, "name", "")
        return cls(thing.__module__, thing.__qualname__, absolute, number, main)

    def inherited(self) -> Any:
        """The object itself, in a process forked from the one that named it, if it was named before the fork."""
        try:
            return _things[self.number]
        except KeyError:
            raise UnknownName(f"{self.module}.{self.qualname} was defined after this process was forked") from None

    def look_up(self) -> Any:
        """The object itself, from a module that is already imported."""
        thing: Any = sys.modules.get(self.module)
        for part in self.qualname.split("."):
            thing = getattr(thing, part, None)
        if thing is None:
            raise UnknownName(f"{self.module}.{self.qualname} does not exist in this process")
        return thing

    def resolve(self) -> Any:
        """The object itself, by name; imports its module if necessary."""
        try:
            return self.look_up()
        except UnknownName:
            self.import_module()
            return self.look_up()

    def import_module(self) -> ModuleType:
        """Import the module under its own name, or from its file if the name does not lead to it."""
        if self.module == "__main__":
            return self._import_main()
        try:
            spec = importlib.util.find_spec(self.module)
        except (ImportError, ValueError):
            spec = None
        if spec is not None and (self.file is None or spec.origin == self.file):
            return importlib.import_module(self.module)
        return self._import_file(self.module)

    def _import_main(self) -> ModuleType:
        # The name __mp_main__ keeps `if __name__ == "__main__"` from running; pickles of the parent refer to __main__.
        _retired_mains.append(sys.modules["__main__"])
        module = self._import_file("__mp_main__", self.main)
        sys.modules["__main__"] = module
        return module

    def _import_file(self, name: str, full_name: str = "") -> ModuleType:
        if self.file is None:
            raise UnknownName(f"module {self.module} has no file to import it from")
        place = ModulePlace.of(self.file)
        if place.name == (full_name or name):
            importing.forget_stdlib_test_package(place)
            importing.import_packages(place)
        try:
            return importing.import_file(name, self.file, full_name=full_name)
        except importing.NoModule as error:
            raise UnknownName(str(error)) from None


@dataclass(frozen=True)
class ProcessContext:
    """The parent's environment, working directory, sys.path and sys.argv at the time of the launch."""

    environ: Mapping[str, str]
    cwd: str
    path: tuple[str, ...]
    argv: tuple[str, ...]

    @classmethod
    def here(cls, extra: Mapping[str, str] | None = None) -> ProcessContext:
        return cls({**os.environ, **(extra or {})}, working_folder(), tuple(sys.path), tuple(sys.argv))

    def apply(self) -> None:
        """Give this process the same."""
        if os.environ != self.environ:
            os.environ.clear()
            os.environ.update(self.environ)
        # It may be closed to this user, or gone: a fork is where its parent was.
        if self.cwd and self.cwd != working_folder():
            os.chdir(self.cwd)
        for own, wanted in ((sys.path, self.path), (sys.argv, self.argv)):
            if tuple(own) != wanted:
                own[:] = wanted


@dataclass(frozen=True)
class Sanitize:
    """The work of the sanitizer in the ranks of a job; without kinds and seed, there is none."""

    kinds: frozenset[SanitizeKind] = frozenset()
    fails_for_order: bool = False
    # The seed of the delays.
    shake: int | None = None
    # The faults of the test, found by the numbers of the calls in the log.
    faults: FaultPlan | None = None

    def __bool__(self) -> bool:
        return bool(self.kinds) or self.shake is not None

    def with_faults(self, plan: FaultPlan | None) -> Sanitize:
        """Have these faults happen, too."""
        return self if plan is None else replace(self, kinds=self.kinds | {SanitizeKind.CALLS}, faults=plan)

    @property
    def note(self) -> str:
        """Say how to run a test again with the same delays; "" without delays."""
        if self.shake is None:
            return ""
        again = f"--shake=1:{self.shake}, or TORCH_TESTING_EXT_SHAKE={self.shake}"
        return f"Collectives were delayed at random, with seed {self.shake}. To repeat the delays: {again}"


@dataclass(frozen=True)
class Job:
    """`body(context, **arguments)` in each of `world_size` ranks, or `body(context, subject, **arguments)`."""

    body: Named
    world_size: int
    # Logs, accounts and stacks of the ranks.
    directory: Path
    context: ProcessContext
    # The class of the test.
    subject: Named | None = None
    arguments: Mapping[str, Any] = field(default_factory=dict)
    seed: int | None = None
    fast_exit: bool = True
    # The ranks descend from the process that made this job.
    inherits: bool = True
    stream: bool = False
    debug_rank: int | None = None
    # For a rank that stops.
    terminal: UserTerminal = field(default_factory=UserTerminal)
    expects_stops: bool = False
    # The reason of a rank that exits with such a code.
    skips: Mapping[int, str] = field(default_factory=dict)
    # None: as the settings say.
    sanitize: Sanitize | None = None
    # Each rank has a hash seed of its own.
    differs_in_hash: bool = False
    # Of a rank that is started again: see RankContext.
    incarnation: int = 0

    @property
    def names(self) -> tuple[Named, ...]:
        """The things that the process which starts the ranks must know: the subject last, if there is one."""
        return (self.body,) if self.subject is None else (self.body, self.subject)

    def context_of(self, rank: int, account: AccountWriter, inherited: Any = None) -> RankContext:
        return RankContext(
            rank,
            self.world_size,
            self.directory,
            account,
            self.seed,
            self.fast_exit,
            is_debugged=self.debug_rank is not None or self.expects_stops,
            inherited=inherited,
            incarnation=self.incarnation,
        )

    def call(self, context: RankContext) -> None:
        """Run the body, in a rank."""
        things = [named.inherited() if self.inherits else named.resolve() for named in self.names]
        body, *subject = things
        body(context, *subject, **self.arguments)

    def log(self, rank: int) -> Path:
        return self.directory / f"rank{rank}.log"

    def account(self, rank: int) -> Path:
        return self.directory / f"rank{rank}.account"

    def stacks(self, rank: int) -> Path:
        return self.directory / f"rank{rank}.stacks"

    def recorder(self, rank: int) -> Path:
        """The collectives of the rank when it was asked for them last, by a probe or with its stacks."""
        return self.directory / f"rank{rank}.recorder"

    def in_flight(self, rank: int) -> Path:
        """The account of the exception that was in flight when the rank was asked for its stacks."""
        return self.directory / f"rank{rank}.in_flight"


def log_of(directory: str | Path, rank: int, incarnation: int = 0) -> Path:
    """The sanitizer's log of all that a rank issues, if it is sanitized."""
    return Path(directory, f"rank{rank}.sanitizer" + AGAIN * incarnation)


# --------------------------------------------------------------------------------------------------------------------
# The collectives of a rank: at the end of each test for its account, and in a file when the parent asks.


def begin_first_task() -> None:
    """In a persistent rank: its first test begins, in which earlier collectives do not count."""
    if _has_made_groups():
        from torch_testing_ext._torch.groups import flight_recorder

        flight_recorder.forget_collectives()


def prepare_to_sanitize(wanted: bool) -> None:
    """In a process that forks ranks: let them inherit the hook, or remove it."""
    if wanted or "torch_testing_ext._collectives.sanitizer.rank_sanitizer" in sys.modules:
        from torch_testing_ext._collectives.sanitizer import rank_sanitizer

        rank_sanitizer.prepare_hook(wanted)


def begin_sanitizing(rank: int, wanted: Sanitize | None, log: Path) -> None:
    """A test begins in this rank."""
    prepare_to_sanitize(bool(wanted))
    if wanted:
        from torch_testing_ext._collectives.sanitizer import rank_sanitizer

        rank_sanitizer.begin_sanitizing(rank, wanted.kinds, wanted.shake, log, wanted.faults, _wait_for_peers)


def _wait_for_peers() -> None:
    """Before a fault: wait until no peer is creating a group that this rank has created, or its creation would fail."""
    context = context_here()
    if context is not None and context.group_creation is not None:
        context.group_creation.wait_for_peers()


def end_of_sanitizing() -> None:
    """The test of this rank has returned. Raises what the sanitizer has failed with."""
    sanitizer = sys.modules.get("torch_testing_ext._collectives.sanitizer.rank_sanitizer")
    if sanitizer is not None:
        sanitizer.finish_sanitizing()


def collectives_of_test(more_follow: bool = False) -> bytes:
    """At the end of a test: the collectives of this rank; b"" if it has made no process group."""
    is_forked_by_test = context_here() is None
    if is_forked_by_test or not _has_made_groups():
        return b""
    from torch_testing_ext._torch.groups import collective_errors, flight_recorder

    sequences = _sequences()
    dumps = flight_recorder.take_collectives() if more_follow else flight_recorder.recorded_collectives()
    packed = _packed(dumps, now(), sequences=sequences)
    if more_follow:
        collective_errors.forget_errors()
    return packed


def write_answer(target: Path, with_state: bool) -> None:
    """While the test runs: write the collectives that this rank has issued so far, and what its threads do."""
    from torch_testing_ext._collectives.blocked.process_threads import state_of_process
    from torch_testing_ext._torch.groups import flight_recorder

    at = now()
    state = state_of_process() if with_state else None
    sanitizer = sys.modules.get("torch_testing_ext._collectives.sanitizer.rank_sanitizer")
    if state is not None and sanitizer is not None and sanitizer.is_active():
        # The parent reads the log; the first dump of a recorder takes half a second.
        state = replace(state, timers=state.timers or sanitizer.has_shorter_timeouts())
        data = _packed([], at, state, {})
    else:
        # Before the dump: a later one would look like a gap.
        sequences = _sequences()
        dumps = flight_recorder.recorded_collectives()
        data = _packed(dumps, at, state, sequences)
    _put(target, data)


def answer_error(target: Path) -> None:
    """While the test runs: write an account of the exception that is in flight in the main thread, if there is one.

    Where no thread can be started, gloo hangs, or aborts without a word: then that is told.
    """
    error = own_report.of_main_thread()
    if error is None and not system.may_start_thread():
        error = RuntimeError(own_report.NO_THREAD)
    if error is not None:
        account = account_of(error, isinstance(error, AssertionError), now())
        _put(target, messages.to_json(account).encode("ascii"))


def _put(target: Path, data: bytes) -> None:
    # The parent may read at any time.
    unfinished = target.with_name(f"{target.name}.new")
    unfinished.write_bytes(data)
    os.replace(unfinished, target)


def _has_made_groups() -> bool:
    """Whether this process has made a process group."""
    log = sys.modules.get("torch_testing_ext._torch.groups.made_groups")
    return log is not None and bool(log.made_groups())


def _packed(
    dumps: list[tuple[int, bytes]],
    at: float,
    state: RankState | None = None,
    sequences: dict[str, tuple[int, int, int]] | None = None,
) -> bytes:
    from torch_testing_ext._torch import torch_frames
    from torch_testing_ext._torch.groups import collective_errors, made_groups

    groups = [group.fields for group in made_groups.made_groups()]
    creating = made_groups.group_in_creation()
    being_made = None if creating is None else creating.fields
    errors = collective_errors.errors_of_collectives()
    return pack_record(groups, dumps, errors, torch_frames.TORCH_FOLDER, at, state, sequences, being_made)


def _sequences() -> dict[str, tuple[int, int, int]] | None:
    from torch_testing_ext._torch.groups import flight_recorder

    # A backend may have none.
    with suppress(Exception):
        return flight_recorder.sequence_numbers()
    return None


# --------------------------------------------------------------------------------------------------------------------
# Stops a rank for the user: at `breakpoint()`; if asked to, at failures and where a test begins, too.
#
# The same for the process of a test under the runner, which is no rank.


class CannotStop(RuntimeError):
    """`breakpoint()` was called where no debugger has a terminal."""


_context: StopContext | None = None
_NO_FAILURES = (CannotStop, KeyboardInterrupt, SystemExit)
# Of unittest, of pytest, and of a debugger, which this package does not import.
_NO_FAILURES_OF_OTHERS = ("SkipTest", "Skipped", "BdbQuit")


def prepare(context: StopContext) -> None:
    """Have `breakpoint()` ask for the user's terminal, unless the user has chosen another debugger."""
    global _context
    _context = context
    if context.terminal.is_chosen:
        # Of the process that this one was forked off.
        sys.settrace(None)
    hook: Any = sys.breakpointhook
    is_ours = getattr(hook, "func", None) is _stop
    if "PYTHONBREAKPOINT" in os.environ or (hook is not sys.__breakpointhook__ and not is_ours):
        return
    sys.breakpointhook = hook = partial(_stop, context)
    if "pdb" in sys.modules:
        sys.modules["pdb"].set_trace = hook  # type: ignore[attr-defined]


def _stop(context: StopContext, *arguments: Any, **options: Any) -> None:
    if not context.terminal.path:
        raise CannotStop(f"breakpoint(){context} cannot stop: {context.terminal.why_not}")
    terminal_turns.about_to_stop = True
    from . import rank_debugger

    rank_debugger.stop(context, sys._getframe(1))


def at_failure(error: BaseException) -> None:
    """The test has raised an exception of its own."""
    if _context is None or not _context.terminal.is_chosen or isinstance(error, _NO_FAILURES):
        return
    if not any(kind.__name__ in _NO_FAILURES_OF_OTHERS for kind in type(error).__mro__):
        from . import rank_debugger

        rank_debugger.look_at_failure(_context, error)


def at_test() -> None:
    if _context is None:
        return
    own_rank = _context.rank or 0
    if _context.terminal.stop_in == own_rank:
        from . import rank_debugger

        rank_debugger.stop_in_test(_context)


def called(context: StopContext) -> None:
    """The user asks for this rank."""
    if terminal_turns.about_to_stop:
        return
    from . import rank_debugger

    rank_debugger.look(context)


# --------------------------------------------------------------------------------------------------------------------
# The process of a rank, from its first instruction to its exit.
#
# Forked (`run_and_exit`) or a new interpreter (`main`), a rank resets inherited state, runs the job's body, writes
# its account, and exits without the interpreter's tear-down.

__first_frames__ = ("_run", "_answer")

# The parent's requests to a rank, and the rank's answers: one byte each. A rank answers ASK_COLLECTIVES by writing
# its probe file.
ASK_RECORDER, RECORDER_DONE = b"R", b"r"
ASK_COLLECTIVES = b"C"
ASK_STACKS, STACKS_DONE = b"S", bytes([system.DUMP_STACKS_NOW])


def run_and_exit(
    job: Job, rank: int, file: AccountFile, link: socket.socket, stream: int | None, inherited: Any = None
) -> NoReturn:
    """Run a rank and exit. `stream`: the descriptor for stdout and stderr; None keeps the current ones.

    `inherited` is for its context.
    """
    code = ERROR_EXIT_CODE
    account = AccountWriter(file)
    try:
        sessions.detach(stream)
        context = job.context_of(rank, account, inherited)
        context.enter()
        _listen(job, rank, link)
        code = _run(job, context)
    except BaseException as error:
        traceback.print_exc()
        if account.account is None:
            account.failed(error, assertion=False, within="the rank could not begin: ")
    finally:
        _save_coverage()
        util = sys.modules.get("multiprocessing.util")
        if util is not None:
            # A queue sends what it was given.
            with suppress(BaseException):
                util._run_finalizers()
        sessions.exit_now(code)


def _save_coverage() -> None:
    """Save what coverage has measured in this rank, which ends without the exit handler that would do so."""
    coverage = running_coverage.current_coverage()
    if coverage is not None:
        with suppress(BaseException):  # whatever happens, a forked rank must not go on
            coverage.stop()
            coverage.save()


def main() -> NoReturn:
    """Run a rank that is a new interpreter: `python -c "... main()" FILE RANK ACCOUNT LINK PARENT`."""
    file = sys.argv[1]
    rank, account_fd, link_fd, parent = map(int, sys.argv[2:6])
    sessions.start_session(parent, signal.SIGKILL)
    job: Job = pickle.loads(Path(file).read_bytes())
    job.context.apply()
    stream = None if job.debug_rank == rank else 1
    account = AccountFile(account_fd, job.account(rank))
    link = socket.socket(fileno=link_fd)
    run_and_exit(job, rank, account, link, stream)


def _run(job: Job, context: RankContext) -> int:
    """Run the body, leave the collectives and account for how it ended. Returns the exit status."""
    account = context.account
    rank = context.rank
    with account.own_errors("the sanitizer could not begin: "):
        begin_sanitizing(rank, job.sanitize, log_of(job.directory, rank, job.incarnation))
    if account.account is not None:
        return account.account.code
    code = _run_body(job, context)
    with account.own_errors():
        end_of_sanitizing()
    with account.own_errors("the collectives of this rank could not be read: "):
        account.attach(collectives_of_test())
    if code or account.account is None:
        return code
    return account.account.code


def _run_body(job: Job, context: RankContext) -> int:
    """Run the body, which accounts for its test. A sys.exit(), or an error outside the test, ends here."""
    account = context.account
    try:
        job.call(context)
    except SystemExit as leaving:
        return _exit_status(leaving, account)
    except BaseException as error:
        account.failed(error, assertion=isinstance(error, AssertionError))
        return ERROR_EXIT_CODE
    if account.account is None:
        account.passed()
    assert account.account is not None
    return account.account.code


def _exit_status(leaving: SystemExit, account: AccountWriter) -> int:
    """The exit status after sys.exit(). Without an account the rank exited before its test finished."""
    if account.account is not None:
        return account.account.code
    if leaving.code is None:
        return 0
    if isinstance(leaving.code, int):
        return leaving.code & 0xFF
    print(leaving.code, file=sys.stderr)
    return 1


def _listen(job: Job, rank: int, link: socket.socket) -> None:
    """Prepare to answer where this rank is, through a thread; where that does not run, stacks on a signal.

    The signal's chain ends in Python's own C-level handler, which writes its number to the wake-up descriptor: so the
    parent knows when the stacks are complete, even if this process holds the GIL in C forever.
    """
    link.setblocking(False)
    stops = StopContext(job.terminal, job.directory, rank, job.world_size)
    if job.debug_rank != rank:
        prepare(stops)
    # A registration of the parent's would still count as such, although the next line replaces its handler.
    faulthandler.unregister(system.DUMP_STACKS_NOW)
    signal.signal(system.DUMP_STACKS_NOW, lambda *_: None)
    signal.set_wakeup_fd(link.fileno(), warn_on_full_buffer=False)
    file = write_on_request(job.stacks(rank), chain=True)
    signals.unblock()
    # Where the watchdog of NCCL writes what it knows. A name that a test chooses counts before this one.
    os.environ.setdefault("TORCH_NCCL_DEBUG_INFO_TEMP_FILE", str(job.directory / "nccl_trace_rank_"))
    # gloo aborts a rank that gets more data than it expects. What it has issued is then told by nobody else.
    system.before_abort(functools.partial(_tell, job.recorder(rank), job.in_flight(rank)))
    # Not a threading.Thread: a test that counts or joins threads should not see it.
    call = open_fifo(job.directory, rank) if job.terminal.path else -1
    _thread.start_new_thread(_answer, (job.recorder(rank), job.in_flight(rank), file, link, stops, call))


def _answer(target: Path, in_flight: Path, file: int, link: socket.socket, stops: StopContext, call: int) -> None:
    """Answer the requests of the parent until it has gone, and the user's calls for this rank."""
    # Poll here, so that this thread's stack has only this function. select() refuses descriptors above 1023.
    poll = select.poll()
    poll.register(link, select.POLLIN)
    if call >= 0:
        poll.register(call, select.POLLIN)
    while True:
        if any(fd == call for fd, _ in poll.poll()):
            os.read(call, 64)
            _thread.start_new_thread(called, (stops,))
        try:
            asked = link.recv(64)
        except BlockingIOError:
            continue
        except OSError:
            return
        if not asked:
            # The process that started this rank is gone.
            return
        if ASK_STACKS in asked:
            write_stacks(file)
            with suppress(OSError):
                link.send(STACKS_DONE)
        if ASK_COLLECTIVES in asked:
            with suppress(Exception):
                write_answer(target, with_state=True)
        if ASK_RECORDER in asked:
            _tell(target, in_flight)
            with suppress(OSError):
                link.send(RECORDER_DONE)


def _tell(target: Path, in_flight: Path) -> None:
    """Write what this rank has issued so far, and the exception that is in flight."""
    with suppress(Exception):
        answer_error(in_flight)
    with suppress(Exception):
        write_answer(target, with_state=False)

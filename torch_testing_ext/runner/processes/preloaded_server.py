"""The process that has imported torch, and those of the test files, forked off it."""

import importlib
import os
import shutil
import signal
import sys
import traceback
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Generic, NoReturn, TypeVar

from torch_testing_ext import launch
from torch_testing_ext._collectives.failure import FailureView
from torch_testing_ext._process import (
    early_threads,
    ends,
    file_reads,
    fork_safety,
    interpreters,
    sessions,
    signals,
    system,
)
from torch_testing_ext._process.channels import Channel
from torch_testing_ext._process.fork_host import Child, Exit, ForkHost
from torch_testing_ext._process.messages import unexpected
from torch_testing_ext._testing.helpers import expectations

from . import supervisor, worker, worker_messages
from .loaded_file import FileSkips, LoadedFile, NeedsPytest, how_to_import
from .worker_messages import ChildGone, Kill, StartUnit

# --------------------------------------------------------------------------------------------------------------------
# The common base of the preloaded server and of the process of a file.

Received = TypeVar("Received")


class ForkParent(ForkHost[Received, Child], Generic[Received]):
    """Forks children that have processes of their own to end, and ends what these leave when they are killed."""

    def __init__(self, client: Channel[Received], kept: frozenset[int] = frozenset()):
        super().__init__(client)
        # Children that live until this process ends.
        self._kept = kept

    def on_request(self, message: Received) -> None:
        """Handle a message of the client, except Kill."""
        raise NotImplementedError

    def on_message(self, message: Received) -> None:
        """Handle a message. A request that the system refuses (a full disk, too many processes) fails alone."""
        if isinstance(message, Kill):
            self.signal_children(message.number, signal.SIGKILL)
            return
        try:
            self.on_request(message)
        except OSError as error:
            number = getattr(message, "number", None)
            if number is not None:
                self.client.send(ChildGone(number, 0, f"could not be started: {error}"))

    def on_end(self, child: Child, end: Exit) -> None:
        self.client.send(ChildGone(child.number, end.status))

    def start_unit(self, message: StartUnit, start: supervisor.Start) -> None:
        """Fork the supervisor of a unit."""
        try:
            self.start(message.number, partial(supervisor.run_and_exit, message, start))
        finally:
            for fd in message.fds:
                os.close(fd)

    def start(self, number: int, run: Callable[[], NoReturn]) -> None:
        """Fork a child with default handlers of signals. Its end is reported as ChildGone."""

        def begin() -> NoReturn:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            system.adopt_orphans()
            signals.unblock()
            run()

        # SIGTERM rather than SIGKILL: the child may have processes to end first.
        pid = self.fork(begin, killed_by=signal.SIGTERM)
        self.children[pid] = Child(number, pid)

    def reap_children(self) -> None:
        super().reap_children()
        # Also if no child has ended: an adopted process may have left others.
        self._end_adopted()

    def end_leftovers(self, child: Child, exited: bool) -> tuple[str, ...]:
        """End them at once: a child that has not been killed has ended all of its own."""
        return self._end_adopted()

    def _end_adopted(self) -> tuple[str, ...]:
        return tuple(ends.end_children(self.children.keys() | self._kept))

    def end_all(self) -> None:
        """End all children. They end their own processes; this process kills the rest."""
        for pid in self.children:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
        for pid in self.children:
            ends.wait_for_exit(pid)
        super().end_all()


# --------------------------------------------------------------------------------------------------------------------
# The process of one test file: it imports the file, lists its tests, and forks a supervisor with a worker for each
# unit.
#
# If the process is not safe to fork, because it runs threads or has queried an accelerator, it reports that, and its
# units become new interpreters.

# The exit code of a child that has queried accelerators while it listed the tests.
_QUERIED_ACCELERATORS = 3


def run_and_exit(request: worker_messages.OpenFile, channel: Channel[worker_messages.ToFile]) -> NoReturn:
    """Be the process of a file: import it, list its tests, and serve its units."""
    os.chdir(request.root)
    try:
        log = os.open(request.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    except OSError as error:
        channel.send(_broken(f"the log of its import cannot be created: {error}"))
        os._exit(0)
    sessions.detach(log)
    system.adopt_orphans()
    fork_safety.mark_fork_safe()
    file_reads.begin(request.reads, inherited=True)
    try:
        file = LoadedFile.load(request.path, request.load_as)
        file_reads.add_modules()
    except NeedsPytest:
        channel.send(worker_messages.FileNeedsPytest())
        os._exit(0)
    except FileSkips as skip:
        channel.send(worker_messages.FileSkipped(skip.reason, skip.want))
        os._exit(0)
    except BaseException as error:
        channel.send(_broken(_explain(error, request.path), error))
        os._exit(0)
    # The import may have set a handler that takes the exit codes of children, or have them thrown away (SIG_IGN).
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    # Every process forked from this one has read the file as it is now.
    expectations.history = Path(request.log).with_name(f"expected{os.getpid()}.json")
    from torch_testing_ext._torch import imported_garbage

    imported_garbage.exempt_imported(garbage=2)
    unsafe = _list_tests(file, request, channel)
    if unsafe is not None:
        channel.send(worker_messages.FileUnsafe(unsafe))
    channel.send(worker_messages.FileReady())
    if unsafe is None:
        FileProcess(channel, file, frozenset(system.children(os.getpid()))).serve()
    os._exit(0)


def _broken(text: str, error: BaseException | None = None) -> worker_messages.FileBroken:
    site = next(iter(launch.sites_of(error)[-1:]), None) if error is not None else None
    return worker_messages.FileBroken(FailureView.of_text(text, site))


def _explain(error: BaseException, path: str) -> str:
    """The error with its traceback, which begins in the test file or in its package: the import itself is left out."""
    tb = error.__traceback__
    while tb is not None and not _is_of_tests(tb.tb_frame.f_code.co_filename, path):
        tb = tb.tb_next
    if isinstance(error, SystemExit):
        title = f"the file called sys.exit({error.code!r}) while it was imported"
    else:
        title = launch.summarize(error)
    text = "".join(traceback.format_exception(type(error), error, tb))
    parts = (title, how_to_import(error, path), text.rstrip())
    return "\n\n".join(part for part in parts if part)


def _is_of_tests(filename: str, path: str) -> bool:
    if filename == path:
        return True
    return filename.endswith("__init__.py") and Path(path).is_relative_to(Path(filename).parent)


def _list_tests(
    file: LoadedFile,
    request: worker_messages.OpenFile,
    channel: Channel[worker_messages.ToFile],
) -> str | None:
    """Send all tests from a child, since that may query accelerators. Returns why not to fork this process, or None."""
    from torch_testing_ext._machine import accelerators

    in_use = accelerators.unsafe_to_fork()
    unsafe = fork_safety.prepare_to_fork()
    pid = fork_safety.fork()
    if pid == 0:
        _send_tests_and_exit(file, request, channel)
    unsafe = unsafe or fork_safety.check_after_fork()
    code = ends.wait_for_exit(pid)
    if code not in (0, _QUERIED_ACCELERATORS):
        channel.send(_broken(f"the process that listed the tests and their needs ended early (code {code})"))
        os._exit(0)
    if in_use:
        return f"its import uses an accelerator: {in_use}"
    if not unsafe and code == _QUERIED_ACCELERATORS:
        return "its import uses an accelerator"
    return unsafe


def _send_tests_and_exit(
    file: LoadedFile, request: worker_messages.OpenFile, channel: Channel[worker_messages.ToFile]
) -> NoReturn:
    """Be the child that lists the tests of a file."""
    code = 1
    try:
        from torch_testing_ext._machine import accelerators
        from torch_testing_ext._torch.devices import accelerator_state

        queried = accelerator_state.accelerator_is_in_bad_fork() and accelerators.device_may_exist()
        tests = file.listing(request.file, request.devices)
        not_run, remark = file.list_not_run(request.file), file.remark(request.file)
        channel.send(worker_messages.FileTests(tests, not_run, remark))
        code = _QUERIED_ACCELERATORS if queried else 0
    except BaseException:
        traceback.print_exc()
    finally:
        system.flush_streams()
        os._exit(code)


class FileProcess(ForkParent[worker_messages.ToFile]):
    """Serves the units of one test file."""

    def __init__(self, channel: Channel[worker_messages.ToFile], file: LoadedFile, kept: frozenset[int]):
        super().__init__(channel, kept)
        self._file = file

    def on_request(self, message: worker_messages.ToFile) -> None:
        match message:
            case worker_messages.StartUnit():
                self.start_unit(message, self._run_worker)
            case worker_messages.PreloadModules(modules):
                self._preload(modules)
            case worker_messages.Kill():
                raise AssertionError("Kill is carried out by ForkParent")
            case _:
                unexpected(message)

    def _run_worker(
        self, unit: worker_messages.UnitSpec, channel: Channel[worker_messages.Nothing], log: int
    ) -> NoReturn:
        worker.run_and_exit(unit, lambda: self._file.tests, channel, log)

    def _preload(self, modules: tuple[str, ...]) -> None:
        """Follow preload hints at once: a worker forked before that would have to import the modules itself."""
        from torch_testing_ext._machine import accelerators

        for name in modules:
            with suppress(Exception):
                importlib.import_module(name)
        why = accelerators.check_to_fork()
        if why:
            message = f"modules that its tests import leave a process unsafe to fork: {why}"
            self.client.send(worker_messages.FileUnsafe(message))


def start_interpreter(unit: worker_messages.UnitSpec, channel: Channel[worker_messages.Nothing], log: int) -> NoReturn:
    """Turn a process into a new interpreter, whose worker imports its file itself."""
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.set_inheritable(channel.fileno(), True)
    words = interpreters.command("runner.processes.worker", sys.path, str(unit.save()), str(channel.fileno()))
    os.execve(sys.executable, words, {**os.environ, **unit.variables})


# --------------------------------------------------------------------------------------------------------------------
# The preloaded server: the process that imports torch once for a whole run and forks a process for each test file.


def main() -> NoReturn:
    """`python -c "... main()" CHANNEL PARENT DIRECTORY DROP_IN COLLAPSE MODULES...`; DROP_IN, COLLAPSE: 0 or 1."""
    parent = int(sys.argv[2])
    directory = sys.argv[3]
    file_reads.start()
    channel: Channel[worker_messages.ToPreloadedServer] = Channel.on(
        int(sys.argv[1]), worker_messages.ToPreloadedServer
    )
    # A warm server has forked this one.
    is_served = any(type(finder).__name__ == "Stash" for finder in sys.meta_path)
    sessions.start_session(os.getppid() if is_served else parent, signal.SIGTERM)
    system.adopt_orphans()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if sys.argv[4] == "1":
        from torch_testing_ext.upstream import drop_in

        drop_in.install()
    unsafe = _warm_up(sys.argv[6:], sys.argv[5] == "1")
    preloaded_server = PreloadedServerProcess(channel)
    channel.send(worker_messages.PreloadedServerReady(unsafe))
    preloaded_server.serve()
    # A client that was killed has not removed it. Without a check: getppid() shows that death only after a moment.
    shutil.rmtree(directory, ignore_errors=True)
    os._exit(0)


def _warm_up(modules: Iterable[str], collapse: bool) -> str | None:
    """Import modules that the test files will need. Returns the reason if this process is not safe to fork, or None."""
    for name in modules:
        # A file that needs the module will report the error.
        with suppress(Exception):
            importlib.import_module(name)
    from torch_testing_ext._machine import accelerators
    from torch_testing_ext._torch import imported_garbage

    accelerators.prepare_to_seed()
    file_reads.add_modules()
    imported_garbage.exempt_imported(garbage=2)
    unsafe = fork_safety.prepare_to_fork()
    if collapse and not unsafe:
        system.collapse_all()
    early = early_threads.explain_early_threads()
    return f"{unsafe}. {early}" if unsafe and early else unsafe


class PreloadedServerProcess(ForkParent[worker_messages.ToPreloadedServer]):
    """Serves the requests of run_test.py."""

    def on_request(self, message: worker_messages.ToPreloadedServer) -> None:
        """Fork the child that run_test.py asks for."""
        match message:
            case worker_messages.OpenFile():
                to_file: Channel[worker_messages.ToFile] = Channel.on(message.fds[0], worker_messages.ToFile)
                self.start(message.number, partial(run_and_exit, message, to_file))
                to_file.close()
            case worker_messages.CountDevices():
                to_counter: Channel[worker_messages.Nothing] = Channel.on(message.fds[0], worker_messages.Nothing)
                self.start(message.number, partial(_count_devices, to_counter))
                to_counter.close()
            case worker_messages.StartUnit():
                # Of a file that is not safe to fork.
                self.start_unit(message, start_interpreter)
            case worker_messages.Kill():
                raise AssertionError("Kill is carried out by ForkParent")
            case _:
                unexpected(message)


def _count_devices(channel: Channel[worker_messages.Nothing]) -> NoReturn:
    """Count accelerators, in a separate process: one that has queried them is not safe to fork."""
    import torch

    from torch_testing_ext._machine import accelerators
    from torch_testing_ext._machine.device_rules import facts_from
    from torch_testing_ext._torch.devices import cuda_state

    fork_safety.mark_fork_safe()
    try:
        kind, count = accelerators.runtime(), accelerators.device_count()
    except accelerators.DriverDoesNotAnswer as error:
        channel.send(worker_messages.DevicesCounted(None, 0, failure=str(error)))
        os._exit(0)
    # While this process can still fork one that asks.
    why_none = ""
    with suppress(accelerators.DriverDoesNotAnswer):
        why_none = accelerators.why_no_device()
    uuids = tuple(accelerators.ask_uuids()) if count else ()
    facts = facts_from(accelerators.ask_facts()) if count else ()
    nccl = cuda_state.nccl_version() if count else ()
    backend = torch.distributed.Backend.default_device_backend_map.get(accelerators.accelerator_type() or "", "")
    channel.send(worker_messages.DevicesCounted(kind, count, torch.__version__, uuids, facts, nccl, backend, why_none))
    os._exit(0)

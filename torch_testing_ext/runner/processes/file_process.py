"""The process of one test file: it imports the file, lists its tests, and forks a supervisor for each unit.

If the process is not safe to fork, because it runs threads or has queried an accelerator, it reports that, and its
units become new interpreters.
"""

import importlib
import os
import signal
import sys
import traceback
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from torch_testing_ext import launch
from torch_testing_ext._collectives.failure import FailureView
from torch_testing_ext._process import ends, file_reads, fork_safety, interpreters, sessions, system
from torch_testing_ext._process.channels import Channel
from torch_testing_ext._process.messages import unexpected
from torch_testing_ext._testing.helpers import expectations

from . import fork_parent_messages, unit_spec, worker
from .file_import import how_to_import
from .fork_parent import ForkParent
from .loaded_file import FileSkips, LoadedFile, is_dropped_in

# The exit code of a child that has queried accelerators while it listed the tests.
_QUERIED_ACCELERATORS = 3


def run_and_exit(request: fork_parent_messages.OpenFile, channel: Channel[fork_parent_messages.ToFile]) -> NoReturn:
    """Be the process of a file: import it, list its tests, and serve its units."""
    os.chdir(request.root)
    try:
        log = os.open(request.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    except OSError as error:
        channel.send(_broken(f"the log of its import cannot be created: {error}"))
        os._exit(0)
    sessions.detach(log)
    system.adopt_orphans()
    fork_safety.of_process.mark_fork_safe()
    file_reads.begin(request.reads, inherited=True)
    try:
        file = LoadedFile.load(request.path, request.load_as)
        file_reads.add_modules()
    except FileSkips as skip:
        channel.send(fork_parent_messages.FileSkipped(skip.reason, skip.want))
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
        channel.send(fork_parent_messages.FileUnsafe(unsafe))
    channel.send(fork_parent_messages.FileReady())
    if unsafe is None:
        FileProcess(channel, file, frozenset(system.children(os.getpid()))).serve()
    os._exit(0)


def _broken(text: str, error: BaseException | None = None) -> fork_parent_messages.FileBroken:
    site = next(iter(launch.sites_of(error)[-1:]), None) if error is not None else None
    return fork_parent_messages.FileBroken(FailureView.of_text(text, site))


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
    # At its end, which a screen shows if the whole is too long for it.
    parts = (title, how_to_import(error, path), text.rstrip(), _of_another_version(error, path))
    return "\n\n".join(part for part in parts if part)


def _of_another_version(error: BaseException, path: str) -> str:
    """Advice if PyTorch's own file is newer or older than the installed torch; or ""."""
    if not is_dropped_in():
        return ""
    from torch_testing_ext.upstream import drop_in

    return drop_in.advice(error, path)


def _is_of_tests(filename: str, path: str) -> bool:
    if filename == path:
        return True
    return filename.endswith("__init__.py") and Path(path).is_relative_to(Path(filename).parent)


def _list_tests(
    file: LoadedFile,
    request: fork_parent_messages.OpenFile,
    channel: Channel[fork_parent_messages.ToFile],
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
    file: LoadedFile, request: fork_parent_messages.OpenFile, channel: Channel[fork_parent_messages.ToFile]
) -> NoReturn:
    """Be the child that lists the tests of a file."""
    code = 1
    try:
        from torch_testing_ext._machine import accelerators
        from torch_testing_ext._torch.devices import accelerator_state

        queried = accelerator_state.accelerator_is_in_bad_fork() and accelerators.device_may_exist()
        tests = file.listing(request.file, request.devices)
        not_run, warnings = file.list_not_run(request.file), file.warnings(request.file)
        channel.send(fork_parent_messages.FileTests(tests, not_run, warnings))
        code = _QUERIED_ACCELERATORS if queried else 0
    except BaseException:
        traceback.print_exc()
    finally:
        system.flush_streams()
        os._exit(code)


class FileProcess(ForkParent[fork_parent_messages.ToFile]):
    """Serves the units of one test file."""

    def __init__(self, channel: Channel[fork_parent_messages.ToFile], file: LoadedFile, kept: frozenset[int]):
        super().__init__(channel, kept)
        self._file = file

    def on_request(self, message: fork_parent_messages.ToFile) -> None:
        match message:
            case fork_parent_messages.StartUnit():
                self.start_unit(message, self._run_worker)
            case fork_parent_messages.PreloadModules(modules):
                self._preload(modules)
            case fork_parent_messages.Kill():
                raise AssertionError("Kill is carried out by ForkParent")
            case _:
                unexpected(message)

    def _run_worker(
        self, unit: unit_spec.UnitSpec, channel: Channel[fork_parent_messages.Nothing], log: int
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
            self.client.send(fork_parent_messages.FileUnsafe(message))


def start_interpreter(unit: unit_spec.UnitSpec, channel: Channel[fork_parent_messages.Nothing], log: int) -> NoReturn:
    """Turn a process into a new interpreter, whose worker imports its file itself."""
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.set_inheritable(channel.fileno(), True)
    words = interpreters.command("runner.processes.worker", sys.path, str(unit.save()), str(channel.fileno()))
    os.execve(sys.executable, words, {**os.environ, **unit.variables})

"""A fork becomes the program: as a new interpreter would, with the descriptors and surroundings of the client."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import importlib.machinery
import io
import os
import signal
import sys
import types
from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn

from .handover import RunProgram, StartedAgain
from .stashed_modules import Stash

_FIRST_FREE = 3
# Descriptors of ours are out of the way of those of the program.
FAR = 200
# The seed of torch, where it does not seed itself by chance.
_FIXED_SEED = 67280421310721
_FORK_SAFETY = "torch_testing_ext._process.fork_safety"
_TERMINAL = "torch_testing_ext._process.user_terminal"

Tell = Callable[[StartedAgain], object]
# The device and inode of a file, the device that it is, and how it is open.
_OpenFile = tuple[int, ...]


class ProgramRequest:
    """A program, and all in which its process has to be like the client's."""

    def __init__(self, program: RunProgram, fds: list[int]):
        self.program = program
        self.cwd, *self.fds = fds
        flags = sys.orig_argv[1 : sys.orig_argv.index("-c")]
        self.command = [sys.executable, *flags]
        if program.kind != "file":
            self.command.append(program.kind)
        self.command += program.words
        cwd = os.fstat(self.cwd)
        # Equal for runs of the same program.
        self.identity = repr((program.kind, program.words[0], cwd.st_dev, cwd.st_ino))

    def close(self) -> None:
        for fd in (self.cwd, *self.fds):
            os.close(fd)


class FreshInterpreter:
    """The state of this interpreter before anything was imported for the server."""

    def __init__(self, modules: list[str], path: list[str]):
        self.modules, self.path = modules, path
        main = vars(sys.modules["__main__"])
        self.main = {name: value for name, value in main.items() if name.startswith("__")}
        self.streams = [(stream.encoding, stream.errors) for stream in (sys.stdin, sys.stdout, sys.stderr)]


def become(request: ProgramRequest, fresh: FreshInterpreter, stash: Stash, tell: Tell) -> Any:
    """Take on the client's surroundings. Returns the program, to be run by the caller, without arguments."""
    asked = request.program
    cwd = _take_descriptors(request)
    given = {number: _file_behind(number) for number in asked.numbers}
    os.umask(asked.umask)
    os.environ.clear()
    os.environ.update(asked.environ)
    for number in asked.ignored:
        signal.signal(number, signal.SIG_IGN)
    if signal.SIGINT not in asked.ignored:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    pid = os.getpid()

    def restart(why: str, environ: dict[str, str | None], folders: list[str]) -> None:
        # A child of the program cannot start that again.
        if os.getpid() == pid:
            tell(StartedAgain(request.identity, why, environ, folders))
            start_cold(request, cwd, given)

    stash.on_conflict = restart
    try:
        stash.hide()
        _renew_streams(fresh, stash)
        _renew_state(stash)
        _skip_static_destructors()
        sys.path_importer_cache.clear()
        sys.path[:] = fresh.path
        main = types.ModuleType("__main__")
        vars(main).update(fresh.main)
        sys.modules["__main__"] = main
        sys.orig_argv[:] = request.command
        program = _PREPARE[asked.kind](asked.words, main)
    except BaseException:
        # Whatever it was, a new interpreter does not depend on it.
        start_cold(request, cwd, given)
    # Not before: a new interpreter would lose an interrupt.
    signal.pthread_sigmask(signal.SIG_SETMASK, asked.blocked)
    return program


def start_cold(request: ProgramRequest, cwd: int, given: dict[int, _OpenFile]) -> NoReturn:
    """Replace this process by a new interpreter for the program, from its beginning. `given`: its descriptors."""
    asked = request.program
    _take_back(given)
    signal.setitimer(signal.ITIMER_REAL, 0)
    for number in signal.valid_signals():
        action = signal.SIG_IGN if number in asked.ignored else signal.SIG_DFL
        # Two have no handler; a thread may not set any.
        with contextlib.suppress(OSError, ValueError):
            signal.signal(number, action)
    signal.pthread_sigmask(signal.SIG_SETMASK, asked.blocked)
    os.umask(asked.umask)
    os.fchdir(cwd)
    os.execve(sys.executable, request.command, asked.environ)


def _take_back(given: dict[int, _OpenFile]) -> None:
    """Give descriptors that the program has redirected their files again, as far as it has copies: pytest captures."""
    open_now = [int(name) for name in os.listdir("/proc/self/fd")]
    now = {fd: _file_behind(fd) for fd in open_now}
    for number, file in given.items():
        if now.get(number) == file:
            continue
        for fd, other in now.items():
            if other == file:
                os.dup2(fd, number)
                break


def _file_behind(fd: int) -> _OpenFile:
    """The file of a descriptor and how it is open; nothing if it is not."""
    try:
        status = os.fstat(fd)
        flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    except OSError:
        return ()
    return status.st_dev, status.st_ino, status.st_rdev, flags & (os.O_ACCMODE | os.O_APPEND)


def _take_descriptors(request: ProgramRequest) -> int:
    """Give the client's descriptors their numbers, and close all others. Returns one for the working directory."""
    numbers = request.program.numbers
    os.fchdir(request.cwd)
    high = max([FAR, *numbers]) + 1
    cwd, *moved = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, high) for fd in (request.cwd, *request.fds)]
    # Before the rest: these may have the numbers that the program's are to have.
    request.close()
    for number in range(_FIRST_FREE):
        if number not in numbers:
            os.close(number)
    for number, fd in zip(numbers, moved, strict=True):
        os.dup2(fd, number)
        os.close(fd)
    return cwd


def _renew_streams(fresh: FreshInterpreter, stash: Stash) -> None:
    """Give the program new standard streams, and those to the handlers of logging that imports have made."""
    before = {id(sys.stderr): "stderr", id(sys.stdout): "stdout"}
    names = ("stdin", "stdout", "stderr")
    for number, name in enumerate(names):
        encoding, errors = fresh.streams[number]
        stream = _text_stream(number, name, encoding, errors)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    for layer in stash.layers:
        logging = layer.modules.get("logging")
        # These are weak.
        for reference in getattr(logging, "_handlerList", ()):
            attributes = getattr(reference(), "__dict__", {})
            name_of_stream = before.get(id(attributes.get("stream")))
            if name_of_stream is not None:
                attributes["stream"] = getattr(sys, name_of_stream)


def _text_stream(number: int, name: str, encoding: str, errors: str | None) -> io.TextIOWrapper | None:
    """A standard stream as a new interpreter makes it; None if its descriptor is closed."""
    is_input = number == 0
    mode = "r" if is_input else "w"
    unbuffered = "-u" in sys.orig_argv or bool(os.environ.get("PYTHONUNBUFFERED"))
    size = 0 if unbuffered and not is_input else -1
    try:
        buffer: Any = open(number, f"{mode}b", size, closefd=False)  # noqa: SIM115
    except OSError:
        return None
    raw = getattr(buffer, "raw", buffer)
    raw.name = f"<{name}>"
    newline = None if is_input else "\n"
    by_lines = not unbuffered and (name == "stderr" or buffer.isatty())
    stream = io.TextIOWrapper(buffer, encoding, errors, newline, by_lines, unbuffered)
    stream.mode = mode  # type: ignore[misc]
    return stream


def _skip_static_destructors() -> None:
    """Have the C library's exit() flush its streams and end the process: torch's destructors take a tenth of a second.

    What the program registers there comes first.
    """
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "on_exit"):
        return
    # The last one is called first; _exit gets the exit code.
    for function in (libc._exit, libc.fcloseall):
        address = ctypes.cast(function, ctypes.c_void_p)
        libc.on_exit(address, None)


def _renew_state(stash: Stash) -> None:
    """Renew what modules know of their process. Python's own modules do so by themselves."""
    for layer in stash.layers:
        modules = layer.modules
        if "numpy.random" in modules:
            modules["numpy.random"].seed()
        torch = modules.get("torch")
        if torch is not None and torch.initial_seed() != _FIXED_SEED:
            torch.default_generator.seed()
        # The stages were checked: this process lacks no thread.
        if _FORK_SAFETY in modules:
            modules[_FORK_SAFETY].mark_fork_safe()
        if _TERMINAL in modules:
            modules[_TERMINAL].look_again()


# -- the kinds of programs


def _prepare_file(words: list[str], main: types.ModuleType) -> Callable[[], object]:
    name = words[0]
    # It keeps "..", unlike os.path.abspath().
    path = os.path.join(os.getcwd(), name)
    _put_first(os.path.dirname(os.path.realpath(name)))
    sys.argv[:] = words
    main.__file__ = path
    main.__loader__ = importlib.machinery.SourceFileLoader("__main__", path)
    if sys.version_info < (3, 15):
        main.__cached__ = None  # type: ignore[attr-defined]
    with open(name, "rb") as file:
        source = file.read()
    return partial(_compiled, source, path, vars(main))


def _prepare_code(words: list[str], main: types.ModuleType) -> Callable[[], object]:
    _put_first("")
    sys.argv[:] = ["-c", *words[1:]]
    return partial(_compiled, words[0], "<string>", vars(main))


def _prepare_module(words: list[str], main: types.ModuleType) -> Callable[[], object]:
    import runpy

    name, *arguments = words
    _put_first(os.getcwd())
    sys.argv[:] = ["-m", *arguments]

    def find_program() -> Callable[[], object]:
        # What `python -m` calls.
        return partial(runpy._run_module_as_main, name)  # type: ignore[attr-defined]

    return find_program


def _put_first(entry: str) -> None:
    if not getattr(sys.flags, "safe_path", False):
        sys.path.insert(0, entry)


def _compiled(source: str | bytes, path: str, namespace: dict[str, Any]) -> Callable[[], object]:
    code = compile(source, path, "exec", dont_inherit=True)
    return partial(exec, code, namespace)


_PREPARE = {"file": _prepare_file, "-c": _prepare_code, "-m": _prepare_module}


def run(program: Callable[[], Callable[[], object]]) -> None:
    """Run the program. What it raises goes on to the interpreter, which ends as usual, but shows no frame of ours."""
    try:
        program()()
    except SystemExit:
        raise
    except BaseException as error:
        ours: list[Any] = [sys._getframe()]
        while ours[-1].f_back is not None:
            ours.append(ours[-1].f_back)
        sys.excepthook = partial(_show_without, ours, sys.excepthook)
        raise error


def _show_without(
    ours: list[Any], hook: Any, kind: type[BaseException], error: BaseException, tb: types.TracebackType | None
) -> None:
    while tb is not None:
        frame = tb.tb_frame
        if frame not in ours and frame.f_code.co_filename != __file__:
            break
        tb = tb.tb_next
    hook(kind, error.with_traceback(tb), tb)

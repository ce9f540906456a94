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

from .stashed_modules import Stash

_FIRST_FREE = 3
FAR = 200  # descriptors of ours are out of the way of those of the program
_FIXED_SEED = 67280421310721  # of torch, where it does not seed itself by chance
_FORK_SAFETY = "torch_testing_ext._process.fork_safety"
_TERMINAL = "torch_testing_ext._process.user_terminal"


Tell = Callable[[dict[str, Any]], object]


class ProgramRequest:
    """A program, and all in which its process has to be like the client's."""

    def __init__(self, message: dict[str, Any], fds: list[int]):
        self.kind: str = message["kind"]  # "file", "-m" or "-c"
        self.words: list[str] = message["words"]  # the file, module or code first
        self.environ: dict[str, str] = message["environ"]
        self.umask: int = message["umask"]
        self.ignored: list[int] = message["ignored"]
        self.blocked: list[int] = message["blocked"]
        self.numbers: list[int] = message["numbers"]  # those of the descriptors in the client
        self.cwd, *self.fds = fds
        flags = sys.orig_argv[1 : sys.orig_argv.index("-c")]
        self.command = [sys.executable, *flags, *([] if self.kind == "file" else [self.kind]), *self.words]

        found = os.fstat(self.cwd)
        self.identity = repr((self.kind, self.words[0], found.st_dev, found.st_ino))  # equal for runs of the same one

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
    cwd = _take_descriptors(request)
    given = {number: _file_behind(number) for number in request.numbers}
    os.umask(request.umask)
    os.environ.clear()
    os.environ.update(request.environ)
    for number in request.ignored:
        signal.signal(number, signal.SIG_IGN)
    if signal.SIGINT not in request.ignored:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    pid = os.getpid()

    def restart(why: str, environ: dict[str, str | None], folders: list[str]) -> None:
        if os.getpid() == pid:
            tell({"program": request.identity, "environ": environ, "why": why, "folders": folders})
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
        program = _PREPARE[request.kind](request.words, main)
    except BaseException:  # whatever it was, a new interpreter does not depend on it
        start_cold(request, cwd, given)
    signal.pthread_sigmask(signal.SIG_SETMASK, request.blocked)  # not before: a new interpreter would lose an interrupt
    return program


def start_cold(request: ProgramRequest, cwd: int, given: dict[int, tuple[int, ...]]) -> NoReturn:
    """Replace this process by a new interpreter for the program, from its beginning. `given`: its descriptors."""
    _take_back(given)
    signal.setitimer(signal.ITIMER_REAL, 0)
    for number in signal.valid_signals():
        with contextlib.suppress(OSError, ValueError):  # two have no handler; a thread may not set any
            signal.signal(number, signal.SIG_IGN if number in request.ignored else signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, request.blocked)
    os.umask(request.umask)
    os.fchdir(cwd)
    os.execve(sys.executable, request.command, request.environ)


def _take_back(given: dict[int, tuple[int, ...]]) -> None:
    """Give descriptors that the program has redirected their files again, as far as it has copies: pytest captures."""
    now = {int(name): _file_behind(int(name)) for name in os.listdir("/proc/self/fd")}
    for number, file in given.items():
        if now.get(number) != file and (copies := [fd for fd, other in now.items() if other == file]):
            os.dup2(copies[0], number)


def _file_behind(fd: int) -> tuple[int, ...]:
    """The file of a descriptor and how it is open; nothing if it is not."""
    try:
        found, flags = os.fstat(fd), fcntl.fcntl(fd, fcntl.F_GETFL)
    except OSError:
        return ()
    return found.st_dev, found.st_ino, found.st_rdev, flags & (os.O_ACCMODE | os.O_APPEND)


def _take_descriptors(request: ProgramRequest) -> int:
    """Give the client's descriptors their numbers, and close all others. Returns one for the working directory."""
    os.fchdir(request.cwd)
    high = max([FAR, *request.numbers]) + 1
    cwd, *moved = (fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, high) for fd in (request.cwd, *request.fds))
    request.close()  # before: these may have the numbers that the program's are to have
    for number in range(_FIRST_FREE):
        if number not in request.numbers:
            os.close(number)
    for number, fd in zip(request.numbers, moved, strict=True):
        os.dup2(fd, number)
        os.close(fd)
    return cwd


def _renew_streams(fresh: FreshInterpreter, stash: Stash) -> None:
    before = {id(sys.stderr): "stderr", id(sys.stdout): "stdout"}
    for number, (name, (encoding, errors)) in enumerate(zip(("stdin", "stdout", "stderr"), fresh.streams, strict=True)):
        stream = _text_stream(number, name, encoding, errors)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    for layer in stash.layers:  # handlers that imports have made write to the streams of this process
        if "logging" in layer.modules:
            for one in layer.modules["logging"]._handlerList:
                handler = one()
                attributes = getattr(handler, "__dict__", {})
                if id(attributes.get("stream")) in before:
                    attributes["stream"] = getattr(sys, before[id(attributes["stream"])])


def _text_stream(number: int, name: str, encoding: str, errors: str | None) -> io.TextIOWrapper | None:
    mode = "r" if number == 0 else "w"
    unbuffered = "-u" in sys.orig_argv or bool(os.environ.get("PYTHONUNBUFFERED"))
    try:
        buffer: Any = open(number, mode + "b", 0 if unbuffered and number > 0 else -1, closefd=False)  # noqa: SIM115
    except OSError:
        return None
    getattr(buffer, "raw", buffer).name = f"<{name}>"
    newline = None if number == 0 else "\n"
    lines = not unbuffered and (number == 2 or buffer.isatty())
    stream = io.TextIOWrapper(buffer, encoding, errors, newline, lines, unbuffered)
    stream.mode = mode  # type: ignore[misc]
    return stream


def _skip_static_destructors() -> None:
    """Have the C library's exit() flush its streams and end the process: torch's destructors take a tenth of a second.

    What the program registers there comes first.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "on_exit"):
        for function in (libc._exit, libc.fcloseall):  # the last one is called first; _exit gets the exit code
            libc.on_exit(ctypes.cast(function, ctypes.c_void_p), None)


def _renew_state(stash: Stash) -> None:
    """Renew what modules know of their process. Python's own modules do so by themselves."""
    for layer in stash.layers:
        if "numpy.random" in layer.modules:
            layer.modules["numpy.random"].seed()
        torch = layer.modules.get("torch")
        if torch is not None and torch.initial_seed() != _FIXED_SEED:
            torch.default_generator.seed()
        if _FORK_SAFETY in layer.modules:  # the stages were checked: this process lacks no thread
            layer.modules[_FORK_SAFETY].mark_fork_safe()
        if _TERMINAL in layer.modules:
            layer.modules[_TERMINAL].look_again()


# -- the kinds of programs


def _prepare_file(words: list[str], main: types.ModuleType) -> Callable[[], object]:
    path = words[0] if os.path.isabs(words[0]) else os.path.join(os.getcwd(), words[0])
    _put_first(os.path.dirname(os.path.realpath(words[0])))
    sys.argv[:] = words
    main.__file__ = path
    main.__loader__ = importlib.machinery.SourceFileLoader("__main__", path)
    if sys.version_info < (3, 15):
        main.__cached__ = None  # type: ignore[attr-defined]
    with open(words[0], "rb") as file:
        return partial(_compiled, file.read(), path, vars(main))


def _prepare_code(words: list[str], main: types.ModuleType) -> Callable[[], object]:
    _put_first("")
    sys.argv[:] = ["-c", *words[1:]]
    return partial(_compiled, words[0], "<string>", vars(main))


def _prepare_module(words: list[str], main: types.ModuleType) -> Callable[[], object]:
    import runpy

    _put_first(os.getcwd())
    sys.argv[:] = ["-m", *words[1:]]
    call = partial(runpy._run_module_as_main, words[0])  # type: ignore[attr-defined]  # which `python -m` calls
    return lambda: call


def _put_first(entry: str) -> None:
    if not getattr(sys.flags, "safe_path", False):
        sys.path.insert(0, entry)


def _compiled(source: str | bytes, path: str, namespace: dict[str, Any]) -> Callable[[], object]:
    return partial(exec, compile(source, path, "exec", dont_inherit=True), namespace)


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
    while tb is not None and (tb.tb_frame in ours or tb.tb_frame.f_code.co_filename == __file__):
        tb = tb.tb_next
    hook(kind, error.with_traceback(tb), tb)

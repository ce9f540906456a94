"""A fork of the warm server becomes a program, from which modules are hidden until it imports them."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import fcntl
import importlib.machinery
import io
import os
import runpy
import signal
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any, ClassVar, NoReturn

from .server_link import RunProgram, StartedAgain

# --------------------------------------------------------------------------------------------------------------------
# Modules that a stage has imported for its programs, hidden from them until they import them.
#
# A program finds `sys.modules` as a new interpreter has it. When it imports a hidden module, the module appears,
# together with all that its import would have brought. First it is compared with the module that the program would
# have got: nothing in front of it in `sys.path` may have its name, and the variables that its import has read must
# have the same values. Otherwise the program has to start again in a new interpreter, which it does before any of its
# own code has used the module.

# Variables that native libraries read when they are loaded: no event shows that.
_OF_THREADS_AND_ALGEBRA = (
    *("OMP_", "GOMP_", "KMP_", "TBB_", "MKL_", "OPENBLAS_", "GOTO_", "BLIS_", "VECLIB_", "NUMEXPR_"),
    *("DNNL_", "ONEDNN_", "NPY_", "NUMPY_"),
)
_OF_TORCH = ("TORCH", "PYTORCH", "ATEN_", "C10_", "KINETO_", "TP_", "GLOO_", "XLA_")
_OF_DEVICES = ("CUDA_", "CUDNN_", "CUBLAS_", "NVIDIA_", "NCCL_", "HIP_", "HSA_", "ROCR_", "ROCM_", "ZE_", "SYCL_")
_NATIVE = (*_OF_THREADS_AND_ALGEBRA, *_OF_TORCH, *_OF_DEVICES)
# Of these, the ones that are read when they are needed.
_READ_LATER = ("TORCH_TESTING_EXT_", "PYTORCH_TEST", "PYTORCH_NVML_BASED_CUDA_CHECK")
# Their native parts cannot be initialised a second time.
_IMPORTED_ONCE = ("torch", "numpy")
_DEFINED = (type, types.FunctionType, types.BuiltinFunctionType)


def variables_of_native_code(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables that native libraries may have read."""
    read_by_libraries = {}
    for name, value in environ.items():
        if name.startswith(_NATIVE) and not name.startswith(_READ_LATER):
            read_by_libraries[name] = value
    return read_by_libraries


class RecordingEnviron(os._Environ):  # type: ignore[type-arg]
    """The class of `os.environ` while a stage imports: it notes which variables are read."""

    _plain: type = os._Environ
    _seen: ClassVar[set[str]] = set()

    @classmethod
    def begin(cls) -> None:
        cls._seen.clear()
        os.environ.__class__ = cls

    @classmethod
    def end(cls) -> frozenset[str]:
        """The variables that were read."""
        os.environ.__class__ = cls._plain
        return frozenset(cls._seen)

    def __getitem__(self, name: str) -> str:
        self._seen.add(name)
        value: str = super().__getitem__(name)
        return value

    def __iter__(self) -> Any:
        for name in super().__iter__():
            self._seen.add(name)
            yield name


class StashedLayer:
    """The modules that one import of a stage has brought, with the state that it has changed."""

    def __init__(
        self,
        names: Iterable[str],
        imported: str = "",
        seen: Mapping[str, str | None] | None = None,
        puts: Mapping[str, str] | None = None,
    ):
        """`imported`: the module that brought them. `seen`, `puts`: the variables that were read, and set."""
        self.modules = {name: sys.modules[name] for name in names}
        self.seen = seen or {}
        self.puts = puts or {}
        # The variables that native libraries may have read.
        self.native: dict[str, str] | None = None
        # Of warnings.
        self.filters: list[Any] = []
        # The modules that are to blame for what the import has changed, as far as that is known.
        tops = (*_IMPORTED_ONCE, _top(imported))
        self.main = {name for name in self.modules if _top(name) in tops}
        # Whether a program has imported one of these.
        self.shown = False

    def changed(self, environ: Mapping[str, str]) -> dict[str, str | None]:
        """The variables that have other values than the import has seen."""
        seen = dict(self.seen)
        if self.native is not None:
            for name in {*variables_of_native_code(environ), *self.native}:
                seen[name] = self.native.get(name)
        return {name: environ.get(name) for name, value in seen.items() if environ.get(name) != value}


def _top(name: str) -> str:
    """The package at the top of a module's name."""
    return name.partition(".")[0]


def _parent(name: str) -> str:
    """The package of a module; nothing if it is in none."""
    return name.rpartition(".")[0]


def _origin(module: Any) -> Any:
    """The file of a module, if its import has left that."""
    spec = getattr(module, "__spec__", None)
    return getattr(spec, "origin", None)


OnConflict = Callable[[str, dict[str, str | None], list[str]], object]


def _ignore(why: str, environ: dict[str, str | None], folders: list[str]) -> None:
    """Do nothing when modules cannot be brought back: this process is no program."""


class Stash:
    """The modules of all stages above a program, and the finder that brings them back."""

    def __init__(self, startup: Iterable[str], path: list[str]):
        """`startup`: the modules of a new interpreter. `path`: its sys.path."""
        self._startup, self._path = frozenset(startup), path
        self.layers: list[StashedLayer] = []
        self._layer_of: dict[str, StashedLayer] = {}
        self._needs: dict[str, list[str]] = {}
        # Called if the program would get other modules, with the reason, the variables that differ, and the folders
        # that hide modules.
        self.on_conflict: OnConflict = _ignore
        # Before anything else registers a function, so that it is called last.
        atexit.register(self._spare)

    def _spare(self) -> None:
        """Keep the interpreter from taking these modules apart at its end, which takes a third of a second."""
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self))
        for name in self._layer_of:
            sys.modules.pop(name, None)

    def new_names(self) -> list[str]:
        return [name for name in sys.modules if name not in self._startup and name not in self._layer_of]

    def add(self, layer: StashedLayer) -> None:
        """Add the modules of an import, and find out which modules each of them needs."""
        self.layers.append(layer)
        for name in layer.modules:
            self._layer_of[name] = layer
        # Their package has made them (`os.path`, `typing.io`), and not imported.
        made = [name for name, module in layer.modules.items() if getattr(module, "__spec__", None) is None]
        for name, module in layer.modules.items():
            made_by_this = [other for other in made if _parent(other) == name]
            needs = {*_names_needed(name, layer), *made_by_this, *_names_used_by(module)}
            needs &= self._layer_of.keys()
            self._needs[name] = sorted(needs - {name})

    def hide(self) -> None:
        """Make `sys.modules` that of a new interpreter. An attribute of a package is hidden with its submodule."""
        for name in [*sys.modules]:
            if name not in self._startup:
                del sys.modules[name]
        for layer in self.layers:
            # What the import of torch does not bring is in a later layer.
            if "torch" in layer.modules:
                continue
            for name, module in layer.modules.items():
                parent, _, child = name.rpartition(".")
                owner = self._module(parent)
                if owner is not None and vars(owner).get(child) is module:
                    delattr(owner, child)
        sys.meta_path.insert(0, self)

    def _module(self, name: str) -> Any:
        """A hidden module of this name; None if there is none."""
        layer = self._layer_of.get(name)
        return None if layer is None else layer.modules[name]

    # -- the finder

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        """Find a hidden module. If the program would get another one, it gets that, or has to start again."""
        if name not in self._layer_of:
            return None
        wanted = self._closure(name)
        why = self._other_module(wanted)
        if why is not None:
            if _top(name) not in _IMPORTED_ONCE:
                # The program gets a new module of this name.
                return None
            self.on_conflict(why, {}, self._new_entries())
        layers = [layer for layer in self.layers if not layer.modules.keys().isdisjoint(wanted)]
        for layer in layers:
            changed = {} if layer.shown else layer.changed(os.environ)
            if changed:
                self.on_conflict(f"the program sets {min(changed)}, which its imports read", changed, [])
        return self._spec_of(name, wanted, layers)

    def _spec_of(self, name: str, wanted: list[str], layers: list[StashedLayer]) -> importlib.machinery.ModuleSpec:
        """The spec of a hidden module: as its own, but for the loader."""
        module = self._module(name)
        own = getattr(module, "__spec__", None)
        loader: Any = _Loader(self, module, wanted, layers)
        spec = importlib.machinery.ModuleSpec(name, loader, origin=_origin(module))
        for attribute in ("submodule_search_locations", "has_location", "cached"):
            with contextlib.suppress(AttributeError):
                setattr(spec, attribute, getattr(own, attribute))
        return spec

    def _closure(self, name: str) -> list[str]:
        """The modules that come with one, in the order of their import."""
        closure = {name}
        to_visit = [name]
        while to_visit:
            visited = to_visit.pop()
            for needed in self._needs[visited]:
                if needed not in closure:
                    closure.add(needed)
                    to_visit.append(needed)
        return [module for layer in self.layers for module in layer.modules if module in closure]

    def _new_entries(self) -> list[str]:
        """The entries of sys.path that the stage did not have, and that come before any of its own."""
        end = len(sys.path)
        for index, entry in enumerate(sys.path):
            if entry in self._path:
                end = index
        new = [entry for entry in sys.path[:end] if entry not in self._path]
        return [os.path.abspath(entry or ".") for entry in new]

    def _is_shadowed(self, name: str, entries: list[str]) -> bool:
        """Whether the program would get another module of this name than the stage has got."""
        spec = importlib.machinery.PathFinder.find_spec(name, entries)
        if spec is None or spec.loader is None:
            return False
        ours = _origin(self._module(name))
        if not isinstance(ours, str):
            return True
        return os.path.realpath(ours) != os.path.realpath(spec.origin or "")

    def _other_module(self, wanted: list[str]) -> str | None:
        """Why the program would not get all of these modules."""
        missing = [entry for entry in self._path if entry not in sys.path]
        if missing:
            return f"sys.path has no {missing[0]} any more"
        for name in wanted:
            if name in sys.modules and sys.modules[name] is not self._module(name):
                return f"the program has a module {name} of its own"
        entries = self._new_entries()
        packages = {_top(name) for name in wanted if name not in sys.modules}
        for name in sorted(packages):
            if self._is_shadowed(name, entries):
                return f"the project has a module {name} of its own"
        return None

    def show(self, wanted: list[str], layers: list[StashedLayer]) -> None:
        """Bring modules back, and what their imports have changed besides."""
        for layer in layers:
            if not layer.shown and not layer.main.isdisjoint(wanted):
                layer.shown = True
                os.environ.update(layer.puts)
                _add_filters(layer.filters)
        for name in wanted:
            if name in sys.modules:
                continue
            module = self._module(name)
            sys.modules[name] = module
            parent, _, child = name.rpartition(".")
            owner = self._module(parent)
            if owner is not None and child not in vars(owner):
                setattr(owner, child, module)


def _add_filters(filters: list[Any]) -> None:
    import warnings

    for added in reversed(filters):
        if added not in warnings.filters:
            # Has the caches of the module renewed.
            warnings.simplefilter("default")
            warnings.filters[0] = added  # type: ignore[index]


# -- the modules that a module needs


def _names_needed(name: str, layer: StashedLayer) -> Iterable[str]:
    """The modules with which it is what its import has made: its package, and with torch all that torch brings."""
    if "torch" not in layer.modules:
        return [_parent(name)]
    if name == "torch":
        return layer.modules
    top = _top(name)
    if name != top:
        return [top]
    return [other for other in layer.modules if other.startswith(f"{name}.")]


def _names_used_by(module: Any) -> Iterator[str]:
    """The modules from which its globals come."""
    values = list(getattr(module, "__dict__", {}).values())
    for value in values:
        # Not isinstance(): it may run code of the value.
        kind = type(value)
        if issubclass(kind, types.ModuleType):
            yield vars(value).get("__name__", "")
            continue
        name = value.__module__ if issubclass(kind, _DEFINED) else kind.__module__
        if isinstance(name, str):
            yield name


class _Loader:
    """Brings one module back."""

    def __init__(self, stash: Stash, module: Any, wanted: list[str], layers: list[StashedLayer]):
        self._stash, self._module, self._wanted, self._layers = stash, module, wanted, layers
        self._spec = getattr(module, "__spec__", None)

    def __getattr__(self, name: str) -> Any:
        """Some ask a loader for the source or the code of a module."""
        own = getattr(self._spec, "loader", None)
        return getattr(own, name)

    def create_module(self, spec: Any) -> Any:
        return self._module

    def exec_module(self, module: Any) -> None:
        with contextlib.suppress(AttributeError):
            module.__spec__ = self._spec
        self._stash.show(self._wanted, self._layers)


# --------------------------------------------------------------------------------------------------------------------
# A fork becomes the program: as a new interpreter would, with the descriptors and surroundings of the client.

_FIRST_FREE = 3
# Descriptors of ours are out of the way of those of the program.
FAR = 200
# The seed of torch, where it does not seed itself by chance.
_FIXED_SEED = 67280421310721
_FORK_SAFETY = "torch_testing_ext._process.fork_safety"
_TERMINAL = "torch_testing_ext._process.terminal"

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


def become_program(request: ProgramRequest, fresh: FreshInterpreter, stash: Stash, tell: Tell) -> Any:
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


def run_program(program: Callable[[], Callable[[], object]]) -> None:
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

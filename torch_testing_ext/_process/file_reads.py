"""The files that a process and its forks read, with hashes of their contents."""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
import sys
import time
from types import FrameType
from typing import Any

from . import interpreters
from .read_hook import NOT_FILES, Listener, ReadHook, may_write, path_of

# A test may replace these in their module, and count the calls: the hook runs within the test.
_close, _listdir, _open, _read, _stat, _unlink, _write = (
    os.close, os.listdir, os.open, os.read, os.stat, os.unlink, os.write
)  # fmt: skip

# Stands for the hash of a file that may have changed since it was read.
CHANGED = "changed"
# Begins an entry for another program that was started, whose reads are unknown.
PROGRAM = "!"
# These end the path of a folder: all of its names count, or those that can be imported.
LISTED, SEARCHED = "*", "?"
_LARGE = 1 << 22
_YOUNG = 10.0
_INSTALLED = ("/site-packages/", "/dist-packages/")
_FOLDERS_OF_TOOLS = ("/.git/", "/.pytest_cache/", "/.hypothesis/", "/.torch_testing_ext/", "/__pycache__/")
_NOT_COUNTED = (*NOT_FILES, f"{os.path.dirname(os.__file__)}/")
_OUR_PROGRAMS = "from torch_testing_ext._machine."
# pytest looks for files by a function of the one, and for conftest files in the other.
_PATHS_OF_PYTEST, _CONFIG_OF_PYTEST = "/_pytest/pathlib.py", "/_pytest/config/__init__.py"
_SEARCHERS = ("<frozen importlib._bootstrap_external>", _PATHS_OF_PYTEST, "/importlib/metadata/__init__.py")
_FIND_LIBRARY = os.path.join(os.path.dirname(os.__file__), "ctypes", "util.py")
_STARTS = ("subprocess.Popen", "os.exec", "os.posix_spawn", "os.spawn", "os.system")
# Modules by which multiprocessing starts interpreters: it has no event for that.
_SPAWNERS = ("multiprocessing.popen_spawn_posix", "multiprocessing.popen_forkserver")


def hash_of(path: str) -> str:
    """The hash of a file, or of the names in a folder; empty if there is none."""
    try:
        if path.endswith((LISTED, SEARCHED)):
            content = _names_that_count(path).encode(errors="surrogateescape")
        else:
            status = _stat(path)
            if not stat.S_ISREG(status.st_mode):
                return "no file"
            if status.st_size > _LARGE:
                return f"{status.st_size}-{status.st_mtime_ns}"
            content = _content_of(path)
    except (OSError, ValueError):
        return ""
    return hashlib.blake2b(content, digest_size=12).hexdigest()


def _content_of(path: str) -> bytes:
    fd = _open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return b"".join(iter(lambda: _read(fd, _LARGE), b""))
    finally:
        _close(fd)


def _is_folder(path: str) -> bool:
    try:
        return stat.S_ISDIR(_stat(path).st_mode)
    except (OSError, ValueError):
        return False


def _names_that_count(path: str) -> str:
    """The names in a folder, as one text, by the last character of its path."""
    names = [name for name in _listdir(path[:-1]) if not name.startswith((".", "__pycache__"))]
    if path.endswith(SEARCHED):
        names = [name for name in names if "." not in name or name.endswith((".py", ".so", ".pyc"))]
    return "\0".join(sorted(names))


class FileReads:
    """The reads of this process."""

    def __init__(self) -> None:
        # Hashes by path.
        self._known: dict[str, str] = {}
        self._written: set[str] = set()
        # pytest looks for one file, and passes by all others.
        self.ignores_walks = False
        self._record: str | None = None
        listeners: dict[str, Listener] = {
            **dict.fromkeys(("open", "ctypes.dlopen", "sqlite3.connect"), self._opened),
            **dict.fromkeys(("os.listdir", "os.scandir"), self._listed),
            "import": self._imported,
            **dict.fromkeys(_STARTS, self._started),
        }
        self._hook = ReadHook(listeners, self._unreadable)

    def begin(self, record: str, inherited: bool) -> None:
        """Write to another record from now on. `inherited`: first everything that was read until now."""
        with contextlib.suppress(OSError):
            os.close(os.open(record, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600))
        self._record = record
        if inherited:
            self._write(self._known)

    def add_modules(self) -> None:
        """Add the modules that this process has imported before there was a hook."""
        old = time.time() - _YOUNG
        for module in [*sys.modules.values()]:
            path = getattr(module, "__file__", None)
            if isinstance(path, str) and path not in self._known and _counts(path):
                with contextlib.suppress(OSError):
                    is_old = os.stat(path).st_mtime < old
                    self._add(path, hash_of(path) if is_old else CHANGED)

    def look_again(self) -> None:
        """Hash the names in folders anew."""
        with self._hook.paused():
            for path in self._known:
                if path.endswith((LISTED, SEARCHED)):
                    self._known[path] = hash_of(path)

    def _unreadable(self, event: str) -> None:
        self._add(f"{PROGRAM}an event that cannot be read: {event}", CHANGED)

    def _opened(self, event: str, path: Any, mode: Any = None, flags: Any = 0) -> None:
        if path and (opened := path_of(path)) is not None:
            name = _source(opened)
            if may_write(flags) and (flags & (os.O_TRUNC | os.O_CREAT)):
                self._written.add(name)
            elif name not in self._written:
                self._note(f"{name}{LISTED}" if _is_folder(name) else name)

    def _note(self, name: str) -> None:
        if name not in self._known and _counts(name):
            self._add(name, hash_of(name))

    def _listed(self, event: str, path: Any = None) -> None:
        if (name := path_of(path)) is not None:
            frame = sys._getframe(2)
            caller = frame.f_code.co_filename
            if self.ignores_walks and _is_walk(frame):
                return
            self._note(f"{name}{SEARCHED if caller.endswith(_SEARCHERS) else LISTED}")

    def _started(self, event: str, program: Any, *arguments: Any) -> None:
        text = repr((program, arguments))
        # These programs read nothing, or have a hook of their own.
        ours = (_OUR_PROGRAMS, *interpreters.RUN_FIRST)
        if any(code in text for code in ours):
            return
        if isinstance(program, bytes):
            program = os.fsdecode(program)
        if not _searches_libraries(str(program)):
            self._add(f"{PROGRAM}{program}", CHANGED)

    def _imported(self, event: str, name: Any, path: Any = None, *more: Any) -> None:
        if name in _SPAWNERS:
            self._add(f"{PROGRAM}{name}", CHANGED)
        elif path:
            self._opened(event, path)

    def _add(self, path: str, content: str) -> None:
        """Note a path, with the hash of its content."""
        self._known[path] = content
        self._write({path: content})

    def _write(self, entries: dict[str, str]) -> None:
        if self._record is None:
            return
        text = "".join(f"{content} {path}\0" for path, content in entries.items())
        try:
            fd = _open(self._record, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
            try:
                _write(fd, text.encode(errors="surrogateescape"))
            finally:
                _close(fd)
        except OSError:
            # Without a record, the test is selected.
            with contextlib.suppress(OSError):
                _unlink(self._record)


_reads: FileReads | None = None


def start() -> None:
    """Note from now on what this process and its forks read."""
    global _reads
    if _reads is None:
        _reads = FileReads()
        _reads.add_modules()


def add_modules() -> None:
    """Add modules that came without being read."""
    if _reads is not None:
        _reads.add_modules()


def look_again() -> None:
    """Hash the names in folders anew, in a fork of a warm server: a new file that changes no import is for each run."""
    if _reads is not None:
        _reads.look_again()


def ignore_walks() -> None:
    """From now on, pytest looks for one file: other files on the way do not count."""
    if _reads is not None:
        _reads.ignores_walks = True


def begin(record: str, inherited: bool = False) -> None:
    """Write what this process, its forks, and the interpreters that it starts read from now on to a file."""
    start()
    assert _reads is not None
    ours = [code for code in interpreters.RUN_FIRST if __name__ in code]
    for code in ours:
        interpreters.RUN_FIRST.remove(code)
    interpreters.RUN_FIRST.append(f"from {__name__} import begin; begin({record!r}, True)")
    _reads.begin(record, inherited)


def read_record(record: str | os.PathLike[str]) -> dict[str, str] | None:
    """The hashes of all files in a record, by path; None if it is missing or torn."""
    try:
        with open(record, "rb") as file:
            text = os.fsdecode(file.read())
    except OSError:
        return None
    *entries, torn = text.split("\0")
    if torn:
        return None
    hashes: dict[str, str] = {}
    for entry in entries:
        content, _, path = entry.partition(" ")
        _add_hash(hashes, path, content)
    return hashes


def merged(first: dict[str, str] | None, second: dict[str, str] | None) -> dict[str, str] | None:
    """The files of two records; None if one is unknown."""
    if first is None or second is None:
        return None
    hashes = dict(first)
    for path, content in second.items():
        _add_hash(hashes, path, content)
    return hashes


def _add_hash(hashes: dict[str, str], path: str, content: str) -> None:
    """Add the hash of one read of a file, which may have changed since an earlier one."""
    is_same = hashes.get(path, content) == content
    hashes[path] = content if is_same else CHANGED


def _searches_libraries(program: str) -> bool:
    """Whether a program only looks for shared libraries of the system, as torch's CUDA builds do on import."""
    if os.path.basename(program) == "ldconfig":
        return True
    # It also starts a compiler and a linker.
    frame = sys._getframe(1)
    while frame.f_back is not None:
        frame = frame.f_back
        if frame.f_code.co_filename == _FIND_LIBRARY:
            return True
    return False


def _is_walk(frame: FrameType) -> bool:
    """Whether pytest itself lists a folder."""
    # Its calls of pathlib are short.
    for _ in range(10):
        code = frame.f_code
        if code.co_filename.endswith(_CONFIG_OF_PYTEST):
            return True
        if code.co_filename.endswith(_PATHS_OF_PYTEST):
            return code.co_name == "scandir"
        if "/pathlib" not in code.co_filename or frame.f_back is None:
            return False
        frame = frame.f_back
    return False


def _source(path: str) -> str:
    """The source of a compiled file; other paths as they are."""
    folder, name = os.path.split(path)
    if name.endswith(".pyc") and (sys.pycache_prefix or os.path.basename(folder) == "__pycache__"):
        module = name.partition(".")[0]
        source_folder = os.path.dirname(folder)
        if sys.pycache_prefix:
            source_folder = folder.removeprefix(sys.pycache_prefix)
        return os.path.join(source_folder, f"{module}.py")
    return path


def _counts(path: str) -> bool:
    """Whether a file may belong to the project. The others change with the environment only."""
    path = f"{path.rstrip(LISTED + SEARCHED)}/"
    if path.startswith(_NOT_COUNTED):
        return False
    return not any(part in path for part in (*_INSTALLED, *_FOLDERS_OF_TOOLS))

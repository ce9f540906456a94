"""The files that a process and its forks read, with hashes of their contents: for the selection of affected tests.

An audit hook hashes each file just before it is opened for reading. A change in between makes the hash too old, which
selects a test too often, never too rarely. Each process appends to one file, so that nothing is lost when it is killed.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
import sys
import time
from typing import Any

from . import interpreter
from .read_hook import NOT_FILES, Listener, ReadHook, may_write, path_of

CHANGED = "changed"  # stands for the hash of a file that may have changed since it was read
PROGRAM = "!"  # begins an entry for another program that was started, whose reads are unknown
LISTED, SEARCHED = "*", "?"  # end the path of a folder: all of its names count, or those that can be imported
_LARGE = 1 << 22
_YOUNG = 10.0
_INSTALLED = ("/site-packages/", "/dist-packages/")
_OF_TOOLS = ("/.git/", "/.pytest_cache/", "/.hypothesis/", "/.torch_testing_ext/", "/__pycache__/")
_NOT_COUNTED = (*NOT_FILES, f"{os.path.dirname(os.__file__)}/")
_OURS = "from torch_testing_ext._machine."
_SEARCHERS = ("<frozen importlib._bootstrap_external>", "/_pytest/pathlib.py", "/importlib/metadata/__init__.py")
_STARTS = ("subprocess.Popen", "os.exec", "os.posix_spawn", "os.spawn", "os.system")
# Modules by which multiprocessing starts interpreters: it has no event for that.
_SPAWNERS = ("multiprocessing.popen_spawn_posix", "multiprocessing.popen_forkserver")


def hash_of(path: str) -> str:
    """The hash of a file, or of the names in a folder; empty if there is none."""
    try:
        if path.endswith((LISTED, SEARCHED)):
            names = {name for name in os.listdir(path[:-1]) if not name.startswith((".", "__pycache__"))}
            if path.endswith(SEARCHED):
                names = {name for name in names if "." not in name or name.endswith((".py", ".so", ".pyc"))}
            content = "\0".join(sorted(names)).encode(errors="surrogateescape")
        else:
            found = os.stat(path)
            if not stat.S_ISREG(found.st_mode):
                return "no file"
            if found.st_size > _LARGE:
                return f"{found.st_size}-{found.st_mtime_ns}"
            with open(path, "rb") as file:
                content = file.read()
    except (OSError, ValueError):
        return ""
    return hashlib.blake2b(content, digest_size=12).hexdigest()


class FileReads:
    """The reads of this process."""

    def __init__(self) -> None:
        self._known: dict[str, str] = {}  # hashes by path
        self._written: set[str] = set()
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
                    self._add(path, hash_of(path) if os.stat(path).st_mtime < old else CHANGED)

    def _unreadable(self, event: str) -> None:
        self._add(f"{PROGRAM}an event that cannot be read: {event}", CHANGED)

    def _opened(self, event: str, path: Any, mode: Any = None, flags: Any = 0) -> None:
        if path and (opened := path_of(path)) is not None:
            name = _source(opened)
            if may_write(flags) and (flags & (os.O_TRUNC | os.O_CREAT)):
                self._written.add(name)
            elif name not in self._written:
                self._note(f"{name}{LISTED}" if os.path.isdir(name) else name)

    def _note(self, name: str) -> None:
        if name not in self._known and _counts(name):
            self._add(name, hash_of(name))

    def _listed(self, event: str, path: Any = None) -> None:
        if (name := path_of(path)) is not None:
            caller = sys._getframe(2).f_code.co_filename
            self._note(f"{name}{SEARCHED if caller.endswith(_SEARCHERS) else LISTED}")

    def _started(self, event: str, program: Any, *arguments: Any) -> None:
        text = repr((program, arguments))
        ours = (_OURS, *interpreter.RUN_FIRST)  # they read nothing, or have a hook of their own
        if not any(code in text for code in ours):
            self._add(f"{PROGRAM}{os.fsdecode(program) if isinstance(program, (str, bytes)) else program}", CHANGED)

    def _imported(self, event: str, name: Any, path: Any = None, *more: Any) -> None:
        if name in _SPAWNERS:
            self._add(f"{PROGRAM}{name}", CHANGED)
        elif path:
            self._opened(event, path)

    def _add(self, path: str, found: str) -> None:
        self._known[path] = found
        self._write({path: found})

    def _write(self, entries: dict[str, str]) -> None:
        if self._record is not None:
            text = "".join(f"{found} {path}\0" for path, found in entries.items())
            try:
                fd = os.open(self._record, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
                try:
                    os.write(fd, text.encode(errors="surrogateescape"))
                finally:
                    os.close(fd)
            except OSError:  # without a record, the test is selected
                with contextlib.suppress(OSError):
                    os.unlink(self._record)


_reads: FileReads | None = None


def start() -> None:
    """Note from now on what this process and its forks read."""
    global _reads
    if _reads is None:
        _reads = FileReads()
        _reads.add_modules()


def add_modules() -> None:
    """Add modules that came without being read: a warm server had them."""
    if _reads is not None:
        _reads.add_modules()


def begin(record: str, inherited: bool = False) -> None:
    """Write what this process, its forks, and the interpreters that it starts read from now on to a file."""
    start()
    assert _reads is not None
    ours = [code for code in interpreter.RUN_FIRST if __name__ in code]
    for code in ours:
        interpreter.RUN_FIRST.remove(code)
    interpreter.RUN_FIRST.append(f"from {__name__} import begin; begin({record!r}, True)")
    _reads.begin(record, inherited)


def read_record(record: str | os.PathLike[str]) -> dict[str, str] | None:
    """The hashes of all files in a record, by path; None if it is missing or torn."""
    try:
        with open(record, "rb") as file:
            *entries, torn = file.read().decode(errors="surrogateescape").split("\0")
    except OSError:
        return None
    found: dict[str, str] = {}
    for entry in entries:
        known, _, path = entry.partition(" ")
        found[path] = known if found.get(path, known) == known else CHANGED
    return None if torn else found


def merged(one: dict[str, str] | None, other: dict[str, str] | None) -> dict[str, str] | None:
    """The files of two records; None if one is unknown."""
    if one is None or other is None:
        return None
    return {**one, **{path: found if one.get(path, found) == found else CHANGED for path, found in other.items()}}


def _source(path: str) -> str:
    """The source of a compiled file; other paths as they are."""
    folder, name = os.path.split(path)
    if name.endswith(".pyc") and (sys.pycache_prefix or os.path.basename(folder) == "__pycache__"):
        inside = folder.removeprefix(sys.pycache_prefix) if sys.pycache_prefix else os.path.dirname(folder)
        return os.path.join(inside, f"{name.partition('.')[0]}.py")
    return path


def _counts(path: str) -> bool:
    """Whether a file may belong to the project: the others change with the environment only."""
    path = f"{path.rstrip(LISTED + SEARCHED)}/"
    return not path.startswith(_NOT_COUNTED) and not any(part in path for part in (*_INSTALLED, *_OF_TOOLS))

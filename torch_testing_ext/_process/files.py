"""Files written whole or not at all, reports of failures that are kept, source files and their packages."""

from __future__ import annotations

import ast
import fcntl
import functools
import hashlib
import importlib.util
import inspect
import io
import os
import sys
import tokenize
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import IO, Any, TypeAlias

from . import words
from .logs import content_of

# --------------------------------------------------------------------------------------------------------------------
# Files that processes lock, so that one of them, or none that writes, uses something at a time.
#
# The lock is flock's: it belongs to the open file, ends with the last process that has it open, and is the same in
# forks. `filelock` knows neither shared locks nor who holds one, and its descriptors are not ours to pass on.

Lockable: TypeAlias = "int | IO[str] | IO[bytes]"


@contextmanager
def open_locked(path: Path, mode: str) -> Iterator[IO[str]]:
    """Open a file of text, once nobody else has it locked, for the length of a `with`. Reading begins at its start."""
    with path.open(mode, encoding="utf-8") as file:
        lock(file)
        file.seek(0)
        yield file


def lock(file: Lockable) -> None:
    """Wait until nobody else has a lock on an open file, and take it. Raises OSError where files cannot be locked."""
    fcntl.flock(file, fcntl.LOCK_EX)


def try_lock(file: Lockable, shared: bool = False) -> bool:
    """Lock an open file if that is possible at once. `shared`: others may have such a lock, too.

    Raises OSError where files cannot be locked.
    """
    try:
        fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def unlock(file: Lockable) -> None:
    """End the lock at once, also where a process that has inherited the open file goes on."""
    fcntl.flock(file, fcntl.LOCK_UN)


def is_locked(file: Lockable) -> bool:
    """Does another process have a lock that nobody shares?"""
    if not try_lock(file, shared=True):
        return True
    unlock(file)
    return False


class OwnedFile:
    """A file to lock, whose content says who has done so. It may be deleted at any time, and is made again."""

    def __init__(self, path: Path):
        self._path = path
        self.fd = self._open()

    def _open(self) -> int:
        return os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)

    def try_lock(self, owner: str) -> bool:
        """Lock the file and write the owner into it, if nobody has locked it."""
        self._reopen_if_deleted()
        if not try_lock(self.fd):
            return False
        # If the disk is full, the lock counts all the same.
        with suppress(OSError):
            os.ftruncate(self.fd, 0)
            os.pwrite(self.fd, owner.encode("utf-8", "surrogateescape"), 0)
        return True

    def unlock(self) -> None:
        with suppress(OSError):
            os.ftruncate(self.fd, 0)
        unlock(self.fd)

    def is_locked(self) -> bool:
        self._reopen_if_deleted()
        return is_locked(self.fd)

    def owner(self) -> str:
        """The text of the process that has locked it, or of the last one if that was killed."""
        return os.pread(self.fd, 1 << 16, 0).decode("utf-8", "replace")

    def _reopen_if_deleted(self) -> None:
        """A program that cleans temporary folders may have deleted the file: other runs would lock another one."""
        with suppress(OSError):
            if not os.path.exists(self._path) or not os.path.samestat(os.stat(self._path), os.fstat(self.fd)):
                new = self._open()
                os.close(self.fd)
                self.fd = new

    def close(self) -> None:
        os.close(self.fd)


# --------------------------------------------------------------------------------------------------------------------
# The package that a test file belongs to, and how to import the file as a member of it.
#
# A file belongs to a package if its folder has an `__init__.py`, as for Python and pytest. Its full name begins with
# the topmost of such folders. Packages are imported by location: a name such as `test` is also one of the standard
# library.


class NoModule(ImportError):
    """A file that Python cannot import, whatever is in it."""


@dataclass(frozen=True)
class ModulePlace:
    """The full name of a file's module, and the folder that holds its topmost package."""

    name: str
    root: Path

    @classmethod
    def of(cls, file: str | Path) -> ModulePlace:
        """Without a package, the module has the name of the file, and the root is the file's folder."""
        file = Path(file)
        folder = file.parent
        # A dot would separate a package.
        parts = [file.stem.replace(".", "_")]
        while folder.name.isidentifier() and (folder / "__init__.py").is_file():
            parts.insert(0, folder.name)
            folder = folder.parent
        return cls(".".join(parts), folder)

    @property
    def packages(self) -> tuple[str, ...]:
        """The full names of the packages that the module is in, the topmost first."""
        *parts, _ = self.name.split(".")
        names = []
        for length in range(1, len(parts) + 1):
            names.append(".".join(parts[:length]))
        return tuple(names)

    def folder_of(self, package: str) -> Path:
        return self.root.joinpath(*package.split("."))

    def obstacle(self) -> str:
        """Return the reason why the file cannot be imported as a member of its package; "" if it can.

        Another package may have the name.
        """
        for package in self.packages:
            module = sys.modules.get(package)
            if module is not None and not _is_at(module, self.folder_of(package)):
                taken_by = getattr(module, "__file__", None) or "another module"
                return f"the name {package} is taken by {taken_by}"
        return ""


def import_packages(place: ModulePlace) -> None:
    """Import the packages that a module is in, each from its folder."""
    for package in place.packages:
        if package not in sys.modules:
            folder = place.folder_of(package)
            import_file(package, folder / "__init__.py", [str(folder)])


def import_file(name: str, file: str | Path, folders: list[str] | None = None, full_name: str = "") -> ModuleType:
    """Import a file under a name; the packages that it is in are imported already.

    `folders`: where the submodules of a package are. `full_name`: for a main module, the name that says which package
    it is in.
    """
    spec = importlib.util.spec_from_file_location(name, str(file), submodule_search_locations=folders)
    if spec is None or spec.loader is None:
        raise NoModule(f"{file} is not a Python module")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    if full_name:
        # `python -m` does the same.
        module.__spec__ = importlib.util.spec_from_file_location(full_name, str(file))
        module.__package__ = full_name.rpartition(".")[0]
    try:
        spec.loader.exec_module(module)
    except BaseException:
        sys.modules.pop(name, None)
        raise
    package, _, child = name.rpartition(".")
    if package in sys.modules:
        setattr(sys.modules[package], child, sys.modules.get(name, module))
    return sys.modules.get(name, module)


def _is_at(package: ModuleType, folder: Path) -> bool:
    try:
        places = getattr(package, "__path__", ())
        return any(os.path.samefile(place, folder) for place in places)
    except OSError:
        return False


def forget_stdlib_test_package(place: ModulePlace) -> None:
    """Forget the standard library's package `test` if the module is in another package of that name."""
    if place.packages[:1] != ("test",) or not place.obstacle():
        return
    stdlib = Path(os.__file__).parent
    file = getattr(sys.modules["test"], "__file__", None) or ""
    if Path(file).parent == stdlib / "test":
        for name in list(sys.modules):
            if name.partition(".")[0] == "test":
                del sys.modules[name]


# --------------------------------------------------------------------------------------------------------------------
# Files: written completely or not at all, behind a descriptor that a test may close, or of source code.

_PACKAGE = f"{Path(__file__).parents[1]}{os.sep}"
# The folders that run tests.
_RUN_TESTS = ("_hypothesis", "_pytest_ranks", "_testing/bases", "launch", "runner")
_HARNESS = tuple(f"{_PACKAGE}{folder}{os.sep}" for folder in _RUN_TESTS)
DESCRIPTORS_CLOSED = "the test closed file descriptors of its process that were not its own (os.close, os.closerange)"


def write_atomically(path: Path, text: str) -> None:
    """Replace a file by one with this text: a reader sees the old text or the new text, never a part.

    A path that is not a regular file (a pipe, a device) cannot be replaced; it is written directly.
    """
    if path.exists() and not path.is_file():
        path.write_text(text, encoding="utf-8", errors="backslashreplace")
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{os.urandom(4).hex()}")
    handle = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        with open(handle, "w", encoding="utf-8", errors="backslashreplace") as stream:
            stream.write(text)
        os.replace(draft, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(draft)
        raise


def source_file(of: Any) -> str:
    """The file with the source of a class or function; "" if it was typed in, or given to `python -c`."""
    try:
        return inspect.getsourcefile(of) or ""
    except (OSError, TypeError):
        return ""


def is_harness(file: str) -> bool:
    """Does this source file run tests? Those that tests use, as for models and assertions, do not count."""
    return file.startswith(_HARNESS)


def is_library(file: str) -> bool:
    """Is this source file neither a test's nor its project's?"""
    return file.startswith((_PACKAGE, "<frozen ")) or "/torch/" in file or "/lib/python3" in file


def source_text(file: str) -> str:
    """The text of a source file, in the encoding that its first lines name; "" if it cannot be read."""
    content = content_of(Path(file))
    try:
        encoding, _ = tokenize.detect_encoding(io.BytesIO(content).readline)
    except SyntaxError:
        encoding = "utf-8"
    return content.decode(encoding, errors="replace")


def source_tree(file: str) -> ast.Module | None:
    """The syntax tree of a source file; None if it cannot be read or parsed."""
    return _parsed(content_of(Path(file)))


@functools.lru_cache(maxsize=8)
def _parsed(source: bytes) -> ast.Module | None:
    try:
        return ast.parse(source) if source else None
    except (SyntaxError, ValueError):
        return None


def file_behind(fd: int) -> tuple[int, int] | None:
    """Identify the file of a descriptor; None if it is closed. Another file may have got its number since."""
    try:
        status = os.fstat(fd)
    except OSError:
        return None
    return status.st_dev, status.st_ino


# --------------------------------------------------------------------------------------------------------------------
# Accounts of failures in files, where tests without a runner keep them. A runner's journal has those of its tests.

CACHE = ".torch_testing_ext"
_FOLDER = "failures"
_MOST = 100  # the newest


def keep_report(test: str, account: str) -> None:
    """Keep the account of a test's failure, in place of an earlier one. It may fail: the test does not fail by that."""
    safe = words.file_name(test)[-100:]
    folder = Path(CACHE, _FOLDER)
    with suppress(OSError):
        make_cache_folder(folder.parent)
        name = f"{safe}.{hashlib.sha1(test.encode(errors='replace')).hexdigest()[:8]}.txt"
        write_atomically(folder / name, f"{test}\n\n{account}\n")
        for old in sorted(folder.glob("*.txt"), key=_age, reverse=True)[_MOST:]:
            old.unlink(missing_ok=True)


def make_cache_folder(folder: Path) -> None:
    """Creates the folder with a .gitignore that hides it from git."""
    if not folder.is_dir():
        folder.mkdir(parents=True, exist_ok=True)
        (folder / ".gitignore").write_text("*\n", encoding="utf-8")


def kept_reports(cache: Path) -> Iterator[tuple[str, str, float]]:
    """The tests with kept accounts: the name, the account and the time, the newest first."""
    for file in sorted(cache.glob(f"{_FOLDER}/*.txt"), key=_age, reverse=True):
        with suppress(OSError):
            name, _, account = file.read_text(encoding="utf-8", errors="replace").partition("\n\n")
            yield name, account.rstrip("\n"), _age(file)


def _age(file: Path) -> float:
    try:
        return file.stat().st_mtime
    except OSError:
        return 0.0

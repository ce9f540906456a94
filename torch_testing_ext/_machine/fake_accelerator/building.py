"""The library of the fake accelerator: one command of the compiler builds it, and a cache keeps it.

The library is in the cache or it is not: the compiler writes into another folder, which gets its name at the end. A
process that builds holds a lock that ends with it, so that one that was killed stops nobody.
"""

from __future__ import annotations

import hashlib
import importlib.machinery
import importlib.util
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch_testing_ext._machine.fake_accelerator import LIBRARY_FOLDER
from torch_testing_ext._process import locks

HERE = Path(__file__).resolve().parent
# The last one includes the others.
SOURCES = ("device.h", "host_view.h", "driver.h", "operations.h", "process_group.cpp")
MODULE = "torch_testing_ext_fakeacc"
LIBRARY = f"{MODULE}.so"
# torch has no flags for its extensions but these. Warnings would be those of its headers.
FLAGS = ("-std=c++20", "-O1", "-g0", "-w", "-fPIC", "-shared", f"-DTORCH_EXTENSION_NAME={MODULE}")
_LINKED = ("torch", "torch_cpu", "torch_python", "c10")
# Beside it: how many bytes it has.
_SIZE = "size"
# With a folder that holds them in sys.path, `import torch` registers the device.
_ENTRY_POINT = f"{MODULE}-0.dist-info"
_METADATA = f"Metadata-Version: 2.1\nName: {MODULE}\nVersion: 0\n"
_ENTRY_POINTS = f"[torch.backends]\nfakeacc = {MODULE}_autoload:autoload\n"
# A program may start another that has no torch_testing_ext, but inherits the search path.
_AUTOLOAD = '''"""Registers the fake accelerator: the entry point that `import torch` calls."""


def autoload():
    try:
        from torch_testing_ext._machine.fake_accelerator import registering
    except ModuleNotFoundError:
        return
    registering.autoload()
'''


class FakeAcceleratorError(RuntimeError):
    """The fake accelerator cannot be had; the message says why, and what to do."""


@dataclass(frozen=True)
class Torch:
    """The torch that this interpreter would import."""

    folder: Path
    version: str
    commit: str


def find_torch() -> Torch:
    """Find torch without importing it, which takes seconds."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        raise FakeAcceleratorError("there is no torch in this environment")
    folder = Path(spec.origin).parent
    facts: dict[str, object] = {}
    exec((folder / "version.py").read_text(encoding="utf-8"), facts)
    return Torch(folder, str(facts["__version__"]), str(facts.get("git_version", "")))


@dataclass(frozen=True)
class Compiler:
    """A C++ compiler: its command, and what it says of its version."""

    command: tuple[str, ...]
    version: str


def find_compiler(environ: dict[str, str] | os._Environ[str] = os.environ) -> Compiler:
    """The compiler that CXX names, else the first of c++, g++ and clang++. Raises FakeAcceleratorError without one."""
    try:
        named = shlex.split(environ.get("CXX", ""))
        commands = [named] if named else [["c++"], ["g++"], ["clang++"]]
        for command in commands:
            if shutil.which(command[0], path=environ.get("PATH")):
                done = subprocess.run([*command, "--version"], capture_output=True, check=False)
                return Compiler(tuple(command), done.stdout.decode(errors="replace").partition("\n")[0])
        missing = f"{named[0]}, which CXX names, is not there" if named else "there is no C++ compiler"
    except (OSError, ValueError) as error:
        missing = f"CXX={environ.get('CXX', '')} cannot be run ({error})"
    raise FakeAcceleratorError(f"{missing}: install one that knows C++20, such as g++, or name it in CXX")


def headers_of_python() -> Path:
    """The folder of Python.h. Raises FakeAcceleratorError without it."""
    folder = Path(sysconfig.get_paths()["include"])
    if not (folder / "Python.h").exists():
        version = sysconfig.get_python_version()
        raise FakeAcceleratorError(f"Python.h is not in {folder}: install the headers of Python (python{version}-dev)")
    return folder


def default_cache() -> Path:
    """The folder of this user that keeps libraries between runs."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    # One that is relative does not count, as XDG says.
    if not os.path.isabs(base):
        base = os.path.join(os.path.expanduser("~"), ".cache")
        if not os.path.isabs(base):
            raise FakeAcceleratorError("there is no home folder for the fake accelerator: set HOME or XDG_CACHE_HOME")
    return Path(base) / "torch_testing_ext" / "fake_accelerator"


def key_of(torch: Torch, compiler: Compiler, sources: Sequence[Path], flags: Sequence[str] = FLAGS) -> str:
    """A name for the library that all that it depends on has a part in."""
    parts = [torch.commit, *flags, *compiler.command, compiler.version]
    digest = hashlib.sha256("\0".join(parts).encode())
    for source in sources:
        digest.update(source.read_bytes())
    return f"{_beginning_of_key(torch.version)}{digest.hexdigest()[:16]}"


def _beginning_of_key(torch_version: str) -> str:
    return f"{torch_version}-{sysconfig.get_config_var('SOABI')}-"


def command_of(torch: Torch, compiler: Compiler, source: Path, library: Path) -> list[str]:
    """The command that compiles and links the library."""
    include = torch.folder / "include"
    folders = (include, include / "torch" / "csrc" / "api" / "include", headers_of_python())
    return [
        *compiler.command,
        *FLAGS,
        *(f"-I{folder}" for folder in folders),
        str(source),
        f"-L{torch.folder / 'lib'}",
        *(f"-l{name}" for name in _LINKED),
        "-o",
        str(library),
    ]


def library_folder(cache: Path, announce: Callable[[str], None]) -> Path:
    """The folder of the library for this torch, which is built if it is not in the cache.

    Raises FakeAcceleratorError if that fails.
    """
    torch = find_torch()
    compiler = find_compiler()
    folder = cache / key_of(torch, compiler, [HERE / name for name in SOURCES])
    try:
        if _is_whole(folder):
            return folder
        cache.mkdir(parents=True, exist_ok=True)
        with _locked(folder.with_name(f"{folder.name}.lock"), announce):
            if not _is_whole(folder):
                announce(f"building the fake accelerator for torch {torch.version}, about 40 s, once")
                _build(torch, compiler, folder)
    except OSError as error:
        why = f"{error.strerror or error}, at {error.filename}" if error.filename else str(error)
        raise FakeAcceleratorError(
            f"the fake accelerator cannot be kept in {cache} ({why}): make it writable and see that there is room, "
            "or set XDG_CACHE_HOME to another folder"
        ) from None
    return folder


@contextmanager
def _locked(lock: Path, announce: Callable[[str], None]) -> Iterator[None]:
    with lock.open("w") as file:
        if not locks.try_lock(file):
            announce("waiting for another process, which builds the fake accelerator")
            locks.lock(file)
        yield


def _is_whole(folder: Path) -> bool:
    """Whether the library is there, with all its bytes. A crash of the machine may lose what was not synced."""
    try:
        return (folder / LIBRARY).stat().st_size == int((folder / _SIZE).read_text())
    except (FileNotFoundError, ValueError):
        return False


def _build(torch: Torch, compiler: Compiler, folder: Path) -> None:
    """Let the compiler write into another folder, and give it the name of this one if that succeeds. Locked."""
    # Folders of processes that were killed, whose compiler may go on to write there.
    for left in folder.parent.glob(f"{folder.name}.*.part"):
        shutil.rmtree(left, ignore_errors=True)
    part = Path(tempfile.mkdtemp(prefix=f"{folder.name}.", suffix=".part", dir=folder.parent))
    part.chmod(0o755)
    try:
        (part / _ENTRY_POINT).mkdir()
        (part / f"{MODULE}_autoload.py").write_text(_AUTOLOAD)
        (part / _ENTRY_POINT / "METADATA").write_text(_METADATA)
        (part / _ENTRY_POINT / "entry_points.txt").write_text(_ENTRY_POINTS)
        command = command_of(torch, compiler, HERE / SOURCES[-1], part / LIBRARY)
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False)
        if done.returncode != 0:
            _check_room(folder.parent, Path(tempfile.gettempdir()))
            log = folder.with_name(f"{folder.name}.log")
            log.write_bytes(shlex.join(command).encode() + b"\n" + done.stdout)
            raise FakeAcceleratorError(_why_failed(compiler, done.returncode, log))
        (part / _SIZE).write_text(str((part / LIBRARY).stat().st_size))
        shutil.rmtree(folder, ignore_errors=True)
        part.rename(folder)
    finally:
        shutil.rmtree(part, ignore_errors=True)


# The library has 1 MB; what the compiler passes to its assembler has more.
_LEAST_ROOM = 16 << 20


def _check_room(*folders: Path) -> None:
    """Raise FakeAcceleratorError if the compiler may have failed because one of its folders is full."""
    for folder in folders:
        if shutil.disk_usage(folder).free < _LEAST_ROOM:
            raise FakeAcceleratorError(
                f"the fake accelerator cannot be built: {folder} is full; make room there, or set XDG_CACHE_HOME for "
                "the library and TMPDIR for the compiler's files to other folders"
            )


def _why_failed(compiler: Compiler, code: int, log: Path) -> str:
    if code < 0:
        return (
            f"the fake accelerator cannot be built: {compiler.command[0]} was killed by signal {-code}; "
            "with too little memory, free 2 GB and try again"
        )
    return (
        f"the fake accelerator cannot be built: {compiler.command[0]} failed (exit code {code}); its output is in "
        f"{log}. Try another compiler: CXX=clang++"
    )


def load_library(torch_version: str) -> Any:
    """The library, which is loaded once. Raises FakeAcceleratorError if it was built for another torch or Python."""
    if MODULE not in sys.modules:
        path = Path(os.environ[LIBRARY_FOLDER], LIBRARY)
        if not path.parent.name.startswith(_beginning_of_key(torch_version)):
            raise FakeAcceleratorError(f"{path} was built for another torch or Python: unset {LIBRARY_FOLDER}")
        loader = importlib.machinery.ExtensionFileLoader(MODULE, str(path))
        spec = importlib.util.spec_from_file_location(MODULE, path, loader=loader)
        assert spec is not None
        library = importlib.util.module_from_spec(spec)
        loader.exec_module(library)
        sys.modules[MODULE] = library
    return sys.modules[MODULE]

"""Starts a run with fake accelerators: in its first process, before any fork. Imports torch only where it must."""

from __future__ import annotations

import atexit
import importlib
import importlib.metadata
import os
import shutil
import sys
from collections.abc import Callable, MutableMapping
from pathlib import Path

from torch_testing_ext._machine.device_locks import LEASE_FOLDER
from torch_testing_ext._machine.fake_accelerator import (
    COUNT,
    LATE_STREAMS,
    LIBRARY_FOLDER,
    MASK,
    MEMORY,
    MEMORY_FILE,
    building,
)
from torch_testing_ext._machine.fake_accelerator.building import FakeAcceleratorError
from torch_testing_ext._machine.fake_accelerator.shared_memory import MOST_DEVICES, make_file
from torch_testing_ext._process import private_folders

_AUTOLOAD = "TORCH_DEVICE_BACKEND_AUTOLOAD"


def announce(text: str) -> None:
    """Tell the user what takes time."""
    print(text, file=sys.stderr, flush=True)


def start(count: int, announce: Callable[[str], None] = announce) -> None:
    """Give fake accelerators to the processes that this one starts, and to this one when it imports torch.

    Raises FakeAcceleratorError if there can be none.
    """
    check(count, os.environ)
    _check_extensions()
    if LIBRARY_FOLDER not in os.environ:
        folder = building.library_folder(building.default_cache(), announce)
        memory = _make_memory_file()
        os.environ[MEMORY_FILE] = str(memory)
        # They are the devices of this run, and other runs have others.
        os.environ[LEASE_FOLDER] = os.environ.get(LEASE_FOLDER) or str(memory.parent / "leases")
        os.environ[LIBRARY_FOLDER] = str(folder)
        # Last: it has one entry point and a library of a name that nobody else uses.
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), str(folder))))
        sys.path.append(str(folder))
    os.environ[COUNT] = str(count)


def start_here(count: int, announce: Callable[[str], None] = announce) -> None:
    """Give fake accelerators to this process, which may have imported torch, and to those that it starts.

    Raises FakeAcceleratorError if there can be none.
    """
    start(count, announce)
    # First: torch calls `registering` in the middle of its import.
    importlib.import_module("torch")
    from .registering import register

    register()


def read_count(text: str) -> int:
    """Read how many the user wants. Raises FakeAcceleratorError if there cannot be so many."""
    if not (text.isdecimal() and 1 <= int(text) <= MOST_DEVICES):
        raise FakeAcceleratorError(f"there can be 1 to {MOST_DEVICES} fake accelerators, not {text or 'none'}")
    return int(text)


def check(count: int, environ: MutableMapping[str, str] | os._Environ[str]) -> None:
    """Raise FakeAcceleratorError if there cannot be so many, or if a setting or a mask is wrong."""
    read_count(str(count))
    memory = environ.get(MEMORY)
    if memory is not None and not (memory.isdecimal() and int(memory)):
        raise FakeAcceleratorError(f"{MEMORY}={memory} is no number of bytes: write one, or unset it")
    if environ.get(LATE_STREAMS) not in (None, "", "0", "1"):
        raise FakeAcceleratorError(f"{LATE_STREAMS}={environ[LATE_STREAMS]} is not understood: write 1, or unset it")
    if environ.get(_AUTOLOAD) == "0":
        raise FakeAcceleratorError(f"{_AUTOLOAD}=0 keeps torch from loading fake accelerators: unset it")
    _check_mask(count, environ.get(MASK, ""))


def _check_mask(count: int, mask: str) -> None:
    """Raise FakeAcceleratorError if a mask names one that there is not, or one twice: then it shows none, as CUDA's."""
    names = [entry.strip() for entry in mask.split(",")]
    for name in names:
        if name in ("", "-1"):
            continue
        if not (name.isdecimal() and int(name) < count):
            raise FakeAcceleratorError(
                f"{MASK}={mask} names {name}, which is not one of the {count} fake accelerators: unset it, or "
                f"name 0 to {count - 1}"
            )
        if names.count(name) > 1:
            raise FakeAcceleratorError(f"{MASK}={mask} names {name} twice, so that none is visible: name it once")


def _check_extensions() -> None:
    """Raise FakeAcceleratorError if torch would load another extension, which wants the same place in torch."""
    for entry in importlib.metadata.entry_points(group="torch.backends"):
        if not entry.value.startswith(building.MODULE):
            raise FakeAcceleratorError(
                f"fake accelerators cannot be used with {entry.name}, an extension of torch: run in an environment "
                "where it is not installed"
            )


def start_as_the_environment_says() -> None:
    """Start in a file that is run directly, if the user has set the variable. Its other processes need not.

    The process ends with one line if that cannot be: nothing else of it has been imported yet.
    """
    count = os.environ.get(COUNT)
    if not count or LIBRARY_FOLDER in os.environ:
        return
    try:
        (start_here if "torch" in sys.modules else start)(read_count(count))
    except FakeAcceleratorError as error:
        sys.exit(f"{COUNT}={count}: {error}")


def _make_memory_file() -> Path:
    """Make the file in which the processes of this run count their memory. This process removes it at its end."""
    folder, _ = private_folders.make_locked("torch_testing_ext-fakeacc-")
    atexit.register(remove_memory_file, folder, os.getpid())
    file = folder / "memory"
    make_file(file)
    return file


def remove_memory_file(folder: Path, owner: int) -> None:
    """Remove the file with its folder, in the process that has made it and in none of its forks."""
    if os.getpid() == owner:
        shutil.rmtree(folder, ignore_errors=True)

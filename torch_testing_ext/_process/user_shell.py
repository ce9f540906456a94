"""The user's shell: commands to copy, the terminal, warnings."""

from __future__ import annotations

import functools
import os
import shlex
import shutil
import sys
import threading
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from .words import in_bytes

# --------------------------------------------------------------------------------------------------------------------
# Words of commands that a user copies into a shell.


def quote(word: str) -> str:
    """A word as a shell reads it; one line of printable characters, whatever is in it.

    Bytes that are no text, and control characters, take the form `$'...'`, which bash, ksh and zsh know.
    """
    if word.isprintable():
        return shlex.quote(word)
    escaped = "".join(map(_escape, word))
    return f"$'{escaped}'"


def _escape(letter: str) -> str:
    if letter in "\\'":
        return f"\\{letter}"
    if letter.isprintable():
        return letter
    encoded = in_bytes(letter)
    return "".join(f"\\x{byte:02x}" for byte in encoded)


def join(words: Iterable[str]) -> str:
    return " ".join(map(quote, words))


def test_as_argument(test: str) -> str:
    """The name of a file or test as an argument: one that begins with a dash is not an option."""
    if test.startswith("-"):
        test = f"./{test}"
    return quote(test)


# --------------------------------------------------------------------------------------------------------------------
# Notes on the test that runs in this process, for the runner of the tests: it takes them when the test has ended.
#
# Warnings for the user; processes that ranks have left running, and that were ended: a test that passes but leaves
# some has *leaked*; the most device memory that each rank has had; and what the faults of a sweep did.

# Of each device: its number, bytes in tensors, bytes that torch has reserved.
Peaks = tuple[tuple[int, int, int], ...]


class KitWarning(NamedTuple):
    """Something that the user should know although the test passes."""

    text: str
    reason: str = ""  # which may differ between processes, as by the names of threads

    def __str__(self) -> str:
        return f"{self.text}, because {self.reason}" if self.reason else self.text


class Notes(NamedTuple):
    """All notes since the last ones were taken."""

    warnings: tuple[KitWarning, ...]
    left_running: tuple[str, ...]
    memory: tuple[Peaks, ...]
    sweeps: tuple[Any, ...]


# The report of the run that this process belongs to begins with what its options leave out.
has_header = False
_warnings: list[KitWarning] = []
_left_running: list[str] = []
_memory: list[Peaks] = []
_sweeps: list[Any] = []


def warn_user(text: str, reason: str = "") -> None:
    """Print a warning on stderr, and note it."""
    warning = KitWarning(text, reason)
    _warnings.append(warning)
    with suppress(Exception):  # a test may have closed or replaced it
        print(f"torch_testing_ext: {warning}", file=sys.stderr, flush=True)


def note_left_running(processes: Iterable[str]) -> None:
    """Note processes, described by the rank that has left them, pid and command."""
    _left_running.extend(processes)


def note_memory(peaks: Iterable[Peaks]) -> None:
    """Note the most memory that each of some ranks has had; nothing of those that have used no device."""
    _memory.extend(filter(None, peaks))


def note_sweep(report: Any) -> None:
    """Note what the faults of a sweep did, or why a drill has none: a `SweepReport`."""
    _sweeps.append(report)


def forget_memory() -> None:
    """Another test begins: what was noted before is not its own."""
    _memory.clear()


def take_notes() -> Notes:
    """Return all notes since the last call."""
    notes = Notes(tuple(_warnings), take_left_running(), tuple(_memory), tuple(_sweeps))
    _warnings.clear()
    _memory.clear()
    _sweeps.clear()
    return notes


def take_left_running() -> tuple[str, ...]:
    """Return the processes that were noted since the last call: after a fixture, nothing else is told."""
    processes = tuple(_left_running)
    _left_running.clear()
    return processes


# --------------------------------------------------------------------------------------------------------------------
# Threads that run before anything of ours: a forked process would lack them.

_threads_at_start = tuple(thread.name for thread in threading.enumerate() if thread is not threading.main_thread())


def explain_early_threads() -> str:
    """Say who has started threads before this package was imported, and what to do; "" if there are none."""
    if not _threads_at_start:
        return ""
    modules = (sys.modules.get(name) for name in ("sitecustomize", "usercustomize"))
    files = [file for module in modules if module is not None and (file := getattr(module, "__file__", ""))]
    by = ", ".join([*files, "a .pth file"])
    return (
        f"Before torch_testing_ext was imported, threads were there already: {', '.join(_threads_at_start)}. {by} or a "
        f"plugin starts them. Run the tests without that, for example with another PYTHONPATH, or each rank in a new "
        f"interpreter: torchrun --nproc-per-node=N -m pytest FILE"
    )


# --------------------------------------------------------------------------------------------------------------------
# The one place that says how a command is written for the project at hand, so that it runs in the user's folder.
#
# The runner has three names: `torchtest`, the console script; this package as a module of Python; and a script of the
# project, such as `run_test.py` in our repository. A printed command has the name by which the user started the
# runner.

PACKAGE = __package__.partition(".")[0]
SCRIPT = "torchtest"
SHOW = "show"
# What `pip install` needs for each extra of pyproject.toml: this package may be on no index, these are.
EXTRAS = {
    "gpu": ("nvidia-ml-py>=12",),
    "pytest": ("pytest>=7.4",),
    "ray": ("ray>=2.40",),
    "ui": ("rich>=13",),
    "moving": ("libcst>=1.4",),
    "upstream": ("libcst>=1.4", "ruff"),
}


def working_folder() -> str:
    """The path of the working folder; "" if it was deleted."""
    try:
        return os.getcwd()
    except OSError:
        return ""


def why_no_working_folder() -> str:
    """Say why programs cannot be started here; "" if they can."""
    try:
        os.stat(".")
        os.getcwd()
    except OSError as error:
        return f"the working folder cannot be used ({error.strerror}): it was deleted, or you may not read it"
    return ""


def relative(path: str) -> str:
    """A path from the working folder; as it is where that was deleted."""
    try:
        return os.path.relpath(path)
    except (OSError, ValueError):
        return path


def python() -> str:
    """The word that starts this interpreter here: `python` if the shell finds it by that name, else its path."""
    return _python(sys.executable, os.environ.get("PATH", ""), working_folder())


@functools.lru_cache(maxsize=8)
def _python(executable: str, path: str, cwd: str) -> str:
    own_folder = os.path.dirname(executable)
    for word in ("python", "python3"):
        program = shutil.which(word, path=path)
        if program is None:
            continue
        folder = os.path.dirname(os.path.abspath(program))
        if not executable or folder == own_folder:
            return word
    return quote(_from(cwd, executable)) if executable else "python"


def command(*words: str) -> str:
    return f"{python()} {join(words)}"


def runner() -> str:
    """The command that starts the runner, as the user gave it."""
    given = sys.argv[0]
    if Path(given).name == SCRIPT:
        on_path = shutil.which(SCRIPT)
        if on_path is not None and os.path.abspath(on_path) == os.path.abspath(given):
            return SCRIPT
        return quote(_from(working_folder(), given))
    if _is_of_project(given):
        script = _from(working_folder(), given)
        return f"{python()} {test_as_argument(script)}"
    return f"{python()} -m {PACKAGE}"


def to_show(test: str) -> str:
    """The command that shows all about the failure of a test that runs without the runner, in this folder."""
    beside_python = Path(sys.executable).with_name(SCRIPT)
    is_found = shutil.which(SCRIPT) == str(beside_python)
    runner = SCRIPT if is_found else f"{python()} -m {PACKAGE}"
    return f"{runner} {SHOW} {test_as_argument(test)}"


def runner_name() -> str:
    """The runner's name in what it says about itself."""
    given = sys.argv[0]
    return Path(given).name if _is_of_project(given) else SCRIPT


def install(extra: str) -> str:
    return f"{python()} -m pip install {join(EXTRAS[extra])}"


def _is_of_project(given: str) -> bool:
    """Is this a file of the project that calls the runner? The others are `python -m NAME` and console scripts."""
    return given.endswith(".py") and Path(given).name != "__main__.py"


def _from(cwd: str, path: str) -> str:
    """A path as it is written in the working directory: relative if it is below that."""
    if not cwd:
        return path
    path = os.path.abspath(path)
    below = os.path.relpath(path, cwd)
    if below.startswith(os.pardir + os.sep):
        return path
    return below if os.sep in below or path.endswith(".py") else f".{os.sep}{below}"


# --------------------------------------------------------------------------------------------------------------------
# The terminal in front of which the user sits, for a debugger in a process that no longer has it.

SETTING = "_TORCH_TESTING_EXT_TERMINAL"
# In its value: the name of the test.
TEST = "{test}"


def _of_stdin() -> str:
    try:
        return os.ttyname(0)
    except OSError:
        return ""


def look_again() -> None:
    """Find the terminal of this process, whose standard input has changed since the import."""
    global _at_start
    _at_start = _of_stdin()


# pytest's capture takes it away later.
_at_start = _of_stdin()


def to_variable(text: str) -> str:
    """A text as `os.environ` holds it: in UTF-8, in every locale."""
    return os.fsdecode(in_bytes(text))


def from_variable(value: str) -> str:
    """The text of a variable that `to_variable` has made."""
    return os.fsencode(value).decode("utf-8", "surrogateescape")


@dataclass(frozen=True)
class UserTerminal:
    """A terminal, or the reason why there is none."""

    path: str = ""
    why_not: str = ""
    # The user has asked for a debugger: it also looks at failures.
    is_chosen: bool = False
    # The rank that stops where its test begins.
    stop_in: int | None = None

    @classmethod
    def here(cls) -> UserTerminal:
        """The terminal of this process; `SETTING` says what it is in the processes of a run."""
        text = os.environ.get(SETTING)
        if text is not None:
            return cls.read(from_variable(text))
        if "PYTEST_XDIST_WORKER" in os.environ:
            return cls(why_not="the workers of pytest-xdist have no terminal: run pytest without -n")
        return cls(_at_start, "" if _at_start else "there is no terminal: run the test in one")

    @classmethod
    def read(cls, text: str) -> UserTerminal:
        """The value of the setting: `RANK:PATH`, where the rank may be missing, or why there is none."""
        rank, colon, path = text.partition(":")
        if not colon or not path.startswith("/"):
            return cls(why_not=text)
        return cls(path, is_chosen=True, stop_in=int(rank) if rank else None)

    def written(self) -> str:
        stop_in = "" if self.stop_in is None else self.stop_in
        return f"{stop_in}:{self.path}" if self.path else self.why_not

    def expects_stops(self, file: str | None) -> bool:
        """Is a debugger likely to stop ranks of a test in this file? Then what they wait for must have no end."""
        if not self.path or self.is_chosen or file is None:
            return bool(self.path) and self.is_chosen
        try:
            return b"breakpoint(" in Path(file).read_bytes()
        except OSError:
            return False

"""Commands as the user would type them in this project and folder.

The runner has three names: `torchtest`, the console script; this package as a module of Python; and a script of the
project, such as `run_test.py` in our repository. A printed command has the name by which the user started the
runner.
"""

from __future__ import annotations

import functools
import os
import shutil
import sys
from pathlib import Path

from .shell_words import join, quote, test_as_argument

PACKAGE = __package__.partition(".")[0]
SCRIPT = "torchtest"
SHOW = "show"
# What `pip install` needs for each extra of pyproject.toml: this package may be on no index, these are.
EXTRAS = {
    "gpu": ("nvidia-ml-py>=12",),
    "pytest": ("pytest>=7.3.2",),
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
    """Whether this is a file of the project that calls the runner, not `python -m NAME` or a console script."""
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

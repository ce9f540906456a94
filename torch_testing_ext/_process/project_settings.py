"""The settings of a project: the folder that has them, and those that tests read without the runner."""

import enum
import functools
import math
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from .logs import text_of

SECTION = "torch_testing_ext"
# A variable of the runner begins with it, and has the same meaning in the processes of tests.
RUNNER_PREFIX = "TORCH_TESTING_EXT_RUN_"
# Files with settings of ours or of pytest, and how such a section begins. As in pytest, the first with some counts.
SECTIONS = {
    "pytest.toml": ("",),
    "pytest.ini": ("",),
    ".pytest.ini": ("",),
    "pyproject.toml": ("[tool.torch_testing_ext", "[tool.pytest"),
    "tox.ini": ("[pytest]",),
    "setup.cfg": ("[tool:pytest]",),
}
SETTINGS_FILES = tuple(SECTIONS)


def project_root(cwd: Path) -> Path:
    """The nearest folder from here upwards that has settings of ours or of pytest; without any, this one."""
    for folder in (cwd, *cwd.parents):
        for file in files_in(folder):
            if file.is_file() and _has_settings(file):
                return folder
    return cwd


def _has_settings(file: Path) -> bool:
    text = text_of(file)
    return any(section in text for section in SECTIONS[file.name])


def files_in(folder: Path) -> list[Path]:
    """The files of a folder that may have settings."""
    return [folder / name for name in SECTIONS]


def read_toml(text: str) -> dict[str, Any]:
    """The content of a TOML file. Raises ValueError."""
    # Most processes read none.
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    content: dict[str, Any] = tomllib.loads(text)
    return content


def is_checkout(folder: Path) -> bool:
    """Is this a checkout of PyTorch, or a project that keeps its tests in the same folder?"""
    return (folder / "test").is_dir()


def tests_of_checkout(folder: Path) -> Path:
    """The tests of a checkout that are for us."""
    return next(path for path in (folder / "test" / "distributed", folder / "test") if path.is_dir())


def root_of_checkout(path: Path) -> Path:
    """The checkout that contains a test file or folder; if there is none, the folder or that of the file."""
    if is_checkout(path):
        return path
    inside = next((folder.parent for folder in path.parents if folder.name == "test"), None)
    return inside or (path if path.is_dir() else path.parent)


# --------------------------------------------------------------------------------------------------------------------
# Our section of pyproject.toml.


class SettingsError(ValueError):
    """A file with settings cannot be read; the message names it and says why."""


def pyproject_section(root: Path) -> dict[str, Any] | None:
    """The settings in pyproject.toml; None if it has no section of ours. Raises SettingsError."""
    file = root / "pyproject.toml"
    try:
        text = file.read_text(encoding="utf-8") if file.exists() else ""
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"{file} cannot be read: {error}") from None
    if f"tool.{SECTION}" not in text.replace(" ", ""):
        return None
    try:
        tool = read_toml(text).get("tool", {})
    except ValueError as error:
        raise SettingsError(f"{file} cannot be read: {error}") from None
    section = tool.get(SECTION) if isinstance(tool, dict) else None
    if not isinstance(section, dict | None):
        raise SettingsError(f"{file}: [tool.{SECTION}] is not a table")
    return section


# --------------------------------------------------------------------------------------------------------------------
# The setting `devices`: what ranks use where nothing else says it.

AUTO, CPU = "auto", "cpu"
# The setting of the run that this process belongs to.
DEVICES_OF_RUN = "_TORCH_TESTING_EXT_DEVICES"


def read_devices(text: str) -> str:
    """`auto`: an accelerator for each rank if the machine has them, else the CPU; or `cpu`."""
    if text not in (AUTO, CPU):
        raise ValueError(f"{text!r} is not one of {AUTO}, {CPU}")
    return text


def default_devices(folder: Path) -> str:
    """The value of the setting for tests in this folder. A value that is wrong is an error of the runner only."""
    text = os.environ.get(DEVICES_OF_RUN) or os.environ.get(f"{RUNNER_PREFIX}DEVICES") or _of_project(folder)
    return CPU if text == CPU else AUTO


@functools.lru_cache(maxsize=16)
def _of_project(folder: Path) -> str:
    root = project_root(folder)
    section = None
    # Errors are for those who read all settings.
    with suppress(SettingsError):
        section = pyproject_section(root)
    return str((section or {}).get("devices", AUTO))


# --------------------------------------------------------------------------------------------------------------------
# Readers: each converts the text of a setting to its value; the message of a ValueError says what is valid.


# As in INI files.
_TRUE = ("1", "yes", "true", "on")
_FALSE = ("0", "no", "false", "off")


def read_boolean(text: str) -> bool:
    word = text.lower()
    if word not in _TRUE + _FALSE:
        raise ValueError(f"{text!r} is not true or false")
    return word in _TRUE


def whole_number(least: int) -> Callable[[str], int]:
    """A reader for whole numbers."""

    def read(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise ValueError(f"{text!r} is not a whole number of at least {least}")
        return int(text)

    return read


count, count_or_zero = whole_number(1), whole_number(0)


def read_seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise ValueError(f"{text!r} is not a positive number of seconds")
    return value


def read_path(text: str) -> Path:
    if not text:
        raise ValueError("the path is empty")
    # As a shell: `~name` stays if there is no such user.
    return Path(os.path.expanduser(text))


def one_of(kind: type[enum.Enum]) -> Callable[[str], Any]:
    """A reader for the values of an enum."""

    def read(text: str) -> Any:
        known = [member.value for member in kind]
        if text not in known:
            raise ValueError(f"{text!r} is not one of {', '.join(known)}")
        return kind(text)

    return read

"""The settings of a project: the folder that has them, and those that tests read without the runner."""

import configparser
import functools
import importlib
import os
from contextlib import suppress
from pathlib import Path
from types import ModuleType
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
    "setup.cfg": ("[torch_testing_ext]", "[tool:pytest]"),
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


def toml_module() -> ModuleType | None:
    """The module that reads TOML: tomllib is in Python since 3.11; tomli is a package."""
    for name in ("tomllib", "tomli"):
        with suppress(ModuleNotFoundError):
            return importlib.import_module(name)
    return None


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
    section: dict[str, Any] = {}
    # Errors are for those who read all settings.
    with suppress(configparser.Error, OSError, UnicodeDecodeError):
        parser = configparser.ConfigParser(interpolation=None)
        parser.read(root / "setup.cfg", encoding="utf-8")
        section.update(parser[SECTION] if parser.has_section(SECTION) else {})
    toml = toml_module()
    text = text_of(root / "pyproject.toml")
    # TOMLDecodeError is a ValueError.
    with suppress(ValueError, AttributeError):
        if toml is not None and SECTION in text:
            section.update(toml.loads(text).get("tool", {}).get(SECTION, {}))
    return str(section.get("devices", AUTO))

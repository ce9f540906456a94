"""The setting `devices`: what ranks use where nothing else says it."""

import functools
import os
from contextlib import suppress
from pathlib import Path

from torch_testing_ext._process.project_folder import project_root
from torch_testing_ext._process.project_settings import RUNNER_PREFIX, SettingsError, pyproject_section

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

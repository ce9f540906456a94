"""The settings from the environment, which tests and ranks read each time, so that a test may change them.

A misspelt name or value is an error that lists the known ones: a setting that silently has no effect costs an hour.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from torch_testing_ext._machine.device_sharing import RANKS_PER_GPU, ranks_per_device
from torch_testing_ext._process.project_settings import RUNNER_PREFIX
from torch_testing_ext._process.setting_names import PREFIX
from torch_testing_ext._process.words import nearest
from torch_testing_ext.launch.aspects import ASPECTS


def known_names() -> tuple[str, ...]:
    """The names of the settings for users."""
    names = (each.name for aspect in ASPECTS for each in aspect.all_settings() if each.name.startswith(PREFIX))
    # Devices are shared by the rules of `_machine`, which reads it.
    return (*names, RANKS_PER_GPU)


def check_settings(environ: Mapping[str, str] = os.environ) -> None:
    """Raise ValueError for an unknown name or value of a setting."""
    known = known_names()
    for name, text in environ.items():
        if name.startswith(PREFIX) and not name.startswith(RUNNER_PREFIX) and text and name not in known:
            raise ValueError(f"{name} is not a variable of torch_testing_ext.{nearest(name, known)}")
    for aspect in ASPECTS:
        for setting in aspect.all_settings():
            setting.value(environ)
    if RANKS_PER_GPU in environ:
        ranks_per_device(environ)

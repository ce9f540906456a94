"""The settings of the start of ranks: the method, and the folder for their files."""

from __future__ import annotations

from pathlib import Path

from torch_testing_ext._process.declarations import Setting, words
from torch_testing_ext._process.setting_names import LOGS as _LOGS


def _directory(text: str) -> Path:
    return Path(text).expanduser().absolute()


START = Setting(
    "TORCH_TESTING_EXT_START",
    "auto, fork, fork-fresh or spawn",
    words("auto", "fork", "fork-fresh", "spawn"),
    "auto",
)
LOGS: Setting[Path | None] = Setting(_LOGS, "a directory", _directory, None)

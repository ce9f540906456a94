"""The settings of ranks that concern each of them: the method of their start, their files, their accounts."""

from __future__ import annotations

from pathlib import Path

from torch_testing_ext._process.declarations import Setting, either, words
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
SHOWLOCALS = Setting("TORCH_TESTING_EXT_SHOWLOCALS", "0 or 1", either("0", "1"), False)

"""Our section of pyproject.toml."""

import sys
from pathlib import Path
from typing import Any

SECTION = "torch_testing_ext"
# As the command is called, and the distribution.
_MISTAKEN = ("torchtest", "torch-testing-ext")
# A variable of the runner begins with it, and has the same meaning in the processes of tests.
RUNNER_PREFIX = "TORCH_TESTING_EXT_RUN_"


def read_toml(text: str) -> dict[str, Any]:
    """The content of a TOML file. Raises ValueError."""
    # Most processes read none.
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    content: dict[str, Any] = tomllib.loads(text)
    return content


class SettingsError(ValueError):
    """A file with settings cannot be read; the message names it and says why."""


def pyproject_section(root: Path) -> dict[str, Any] | None:
    """The settings in pyproject.toml; None if it has no section of ours. Raises SettingsError."""
    file = root / "pyproject.toml"
    try:
        text = file.read_text(encoding="utf-8") if file.exists() else ""
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"{file} cannot be read: {error}") from None
    without_spaces = text.replace(" ", "")
    for mistaken in _MISTAKEN:
        if f"tool.{mistaken}]" in without_spaces:
            raise SettingsError(f"{file} has [tool.{mistaken}]: write [tool.{SECTION}]")
    if f"tool.{SECTION}" not in without_spaces:
        return None
    try:
        tool = read_toml(text).get("tool", {})
    except ValueError as error:
        raise SettingsError(f"{file} cannot be read: {error}") from None
    section = tool.get(SECTION) if isinstance(tool, dict) else None
    if not isinstance(section, dict | None):
        raise SettingsError(f"{file}: [tool.{SECTION}] is not a table")
    return section

"""The names of options, and their values as a user writes them."""

from __future__ import annotations

from typing import Any

from .all_options import OPTION_TABLE
from .declaring import Level


def setting_name(field: str) -> str:
    """The name of an option in configuration files: `cluster.nodes`, `lease-folder`."""
    table = OPTION_TABLE[field].needs if field in OPTION_TABLE else ""
    # An option has a table for the settings that mean nothing without it.
    start = f"{table}_"
    name = f"{table}.{field.removeprefix(start)}" if table and field.startswith(start) else field
    return name.replace("_", "-")


def written_name(field: str) -> str:
    """The name by which a command line has an option: that of its flag, or of its setting."""
    spec = OPTION_TABLE[field]
    flags = [*spec.flags, *(name for value in spec.values for name in value.names)]
    return flags[0] if flags and spec.level is not Level.SETTING else f"-o {setting_name(field)}"


def shown_value(value: Any) -> str:
    """The value of an option, as a user would write it."""
    if isinstance(value, tuple):
        return ", ".join(map(shown_value, value)) or "(none)"
    if isinstance(value, bool):
        return str(value).lower()
    if value is None:
        return "(none)"
    # A member of an enumeration stands for its value.
    return str(getattr(value, "value", value))

"""The doors by which reports and sites come in: entry points of installed packages, ours among them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from importlib import metadata

REPORTS = "torchtest.reports"
SITES = "torchtest.sites"


def entries(group: str, own: Mapping[str, str]) -> dict[str, metadata.EntryPoint]:
    """The entry points of a group, by name: first ours, then those of other packages.

    `own`: what pyproject.toml declares. A checkout that is not installed, or was before it declared them, has no
    metadata of these.
    """
    # It takes 10 ms, which --help does without.
    from importlib import metadata

    installed = metadata.entry_points(group=group)
    by_name = {name: metadata.EntryPoint(name, value, group) for name, value in own.items()}
    for entry in installed:
        # One of another package with the name of ours comes in its place.
        if entry.name not in own or not entry.value.startswith("torch_testing_ext."):
            by_name[entry.name] = entry
    return by_name

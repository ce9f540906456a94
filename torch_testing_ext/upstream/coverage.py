"""Compare PyTorch's test kit with ours: `python -m torch_testing_ext.upstream coverage [--pytorch CHECKOUT]`.

The public names that count are those that a module of PyTorch's defines, or re-exports from another module of its kit.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from . import names, reasons
from .mapping import MIRRORED, THEIR_KIT, MirroredModule, UserError, source_of

PAGE, DATA = "coverage.md", "coverage.json"
REFRESH = "python -m torch_testing_ext.upstream coverage --write docs"


@dataclass
class ModuleCoverage:
    """The public names of one module of PyTorch's, by whether we have them."""

    theirs: str
    ours: str
    here: list[str] = field(default_factory=list)
    lacking: list[str] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)  # name -> reason

    @property
    def share(self) -> float:
        """The percentage present of the names that are not refused."""
        wanted = len(self.here) + len(self.lacking)
        return 100 * len(self.here) / wanted if wanted else 100.0


def measure(root: Path) -> list[ModuleCoverage]:
    """Compare with the sources below a directory: a checkout, or the place where torch is installed."""
    found = [(pair, source_of(pair.theirs, root)) for pair in MIRRORED]
    measured = [_measure(pair, source) for pair, source in found if source is not None]
    if not measured:
        raise UserError(f"{root} is not a PyTorch checkout: it has no module {THEIR_KIT}")
    return measured


def _measure(pair: MirroredModule, source: Path) -> ModuleCoverage:
    covered = ModuleCoverage(pair.theirs, pair.ours)
    ours = importlib.import_module(pair.ours) if pair.is_here else None
    for name in sorted(public_names(source)):
        if ours is not None and hasattr(ours, name):
            covered.here.append(name)
        elif reason := reasons.refused(name):
            covered.refused[name] = reason
        else:
            covered.lacking.append(name)
    return covered


def public_names(source: Path) -> set[str]:
    """The names that a test file may import: those in `__all__`, and those that are not imported from elsewhere."""
    own = {name for name, kind in names.defined_in(source).items() if kind is not names.NameKind.IMPORTED}
    return {name for name in own | names.declared_in(source) if not name.startswith("_")}


def version_of(root: Path) -> str:
    """The version of torch of the sources: major and minor."""
    file = root / "version.txt"
    text = file.read_text() if file.is_file() else importlib.metadata.version("torch")
    return ".".join(text.split(".")[:2])


# -- output


def as_data(measured: list[ModuleCoverage], version: str) -> dict[str, Any]:
    modules = {
        one.theirs: {"ours": one.ours, "here": one.here, "lacking": one.lacking, "refused": one.refused}
        for one in measured
    }
    return {"torch": version, "modules": modules}


def as_json(measured: list[ModuleCoverage], version: str) -> str:
    return json.dumps(as_data(measured, version), indent=1, ensure_ascii=False) + "\n"


def as_table(measured: list[ModuleCoverage]) -> str:
    """The numbers, one line per module."""
    rows = [(f"module of {THEIR_KIT}", "present", "missing", "refused", "present, of those not refused")]
    rows += [
        (_short(one.theirs), str(len(one.here)), str(len(one.lacking)), str(len(one.refused)), f"{one.share:.0f} %")
        for one in measured
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [" | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    ruler = " | ".join("-" * width for width in widths)
    return "\n".join(f"| {line} |" for line in [lines[0], ruler, *lines[1:]])


def as_page(measured: list[ModuleCoverage], version: str) -> str:
    parts = [_HEAD.format(version=version, refresh=REFRESH), as_table(measured), *map(_section, measured)]
    return "\n\n".join(parts) + "\n"


_HEAD = """\
# Coverage of PyTorch's test kit

This page compares our modules with those of torch {version}. It counts the public names that each module defines or
re-exports from another module of the kit. Missing names still work in a drop-in run, which uses PyTorch's own; see
[upstream.md](upstream.md). A test fails while this page or [coverage.json](coverage.json) is out of date. To update
them, run `{refresh}`."""


def _section(one: ModuleCoverage) -> str:
    parts = [f"## {_short(one.theirs)}"]
    if one.lacking:
        parts.append(f"Missing: {_listed(one.lacking)}")
    parts += [f"Refused ({reason}): {_listed(refused)}" for reason, refused in _by_reason(one)]
    return "\n\n".join(parts if len(parts) > 1 else [*parts, "Every name is present."])


def _by_reason(one: ModuleCoverage) -> Iterator[tuple[str, list[str]]]:
    for reason in dict.fromkeys(one.refused.values()):
        yield reason, [name for name, why in one.refused.items() if why == reason]


def _listed(found: list[str]) -> str:
    return ", ".join(f"`{name}`" for name in found)


def _short(module: str) -> str:
    return module.removeprefix(f"{THEIR_KIT}.")


def write(measured: list[ModuleCoverage], version: str, directory: Path) -> None:
    """Write the page and the data to a directory."""
    (directory / PAGE).write_text(as_page(measured, version), encoding="utf-8")
    (directory / DATA).write_text(as_json(measured, version), encoding="utf-8")


def outdated(measured: list[ModuleCoverage], version: str, directory: Path) -> list[str]:
    """The differences from the stored page and data.

    For another version of torch, only names that both versions have are compared: whether we have or refuse a name does
    not depend on the version.
    """
    stored = json.loads((directory / DATA).read_text(encoding="utf-8"))
    if stored["torch"] == version:
        same = (directory / PAGE).read_text(encoding="utf-8") == as_page(measured, version)
        return [] if same and stored == as_data(measured, version) else [f"{PAGE} or {DATA} is out of date"]
    now, then = _states(as_data(measured, version)), _states(stored)
    return sorted(
        f"{name} is {now[name]}, not {then[name]}" for name in now.keys() & then.keys() if now[name] != then[name]
    )


def _states(data: dict[str, Any]) -> dict[str, str]:
    return {
        f"{module}.{name}": state
        for module, parts in data["modules"].items()
        for state in ("here", "lacking", "refused")
        for name in parts[state]
    }

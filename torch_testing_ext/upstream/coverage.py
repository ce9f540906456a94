"""How much of PyTorch's test kit is here: `python -m torch_testing_ext.upstream coverage [--pytorch CHECKOUT]`.

A public name counts that the module of PyTorch's defines, or hands on from another module of its kit.
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
from .mapping import MIRRORED, THEIR_KIT, Mirrored, Mistake, source_of

PAGE, DATA = "coverage.md", "coverage.json"
REFRESH = "python -m torch_testing_ext.upstream coverage --write docs"


@dataclass
class Covered:
    """The public names of one module of PyTorch's."""

    theirs: str
    ours: str
    here: list[str] = field(default_factory=list)
    lacking: list[str] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)  # name -> reason

    @property
    def share(self) -> float:
        """Of the names that are not refused."""
        wanted = len(self.here) + len(self.lacking)
        return 100 * len(self.here) / wanted if wanted else 100.0


def measure(root: Path) -> list[Covered]:
    """Compare with the sources below a directory: a checkout, or where torch is installed."""
    found = [(pair, source_of(pair.theirs, root)) for pair in MIRRORED]
    measured = [_measure(pair, source) for pair, source in found if source is not None]
    if not measured:
        raise Mistake(f"{root} is no checkout of PyTorch: it has no module {THEIR_KIT}")
    return measured


def _measure(pair: Mirrored, source: Path) -> Covered:
    covered = Covered(pair.theirs, pair.ours)
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
    """What a test file may rightly import: what is said to be public, and else what the module does not import."""
    own = {name for name, kind in names.defined_in(source).items() if kind is not names.NameKind.IMPORTED}
    return {name for name in own | names.declared_in(source) if not name.startswith("_")}


def version_of(root: Path) -> str:
    """Which torch the sources are of: major and minor."""
    written = root / "version.txt"
    text = written.read_text() if written.is_file() else importlib.metadata.version("torch")
    return ".".join(text.split(".")[:2])


# -- what is printed and kept


def as_data(measured: list[Covered], version: str) -> dict[str, Any]:
    modules = {
        one.theirs: {"ours": one.ours, "here": one.here, "lacking": one.lacking, "refused": one.refused}
        for one in measured
    }
    return {"torch": version, "modules": modules}


def as_json(measured: list[Covered], version: str) -> str:
    return json.dumps(as_data(measured, version), indent=1, ensure_ascii=False) + "\n"


def as_table(measured: list[Covered]) -> str:
    """The numbers, a line a module."""
    rows = [(f"module of {THEIR_KIT}", "here", "lacking", "refused", "of those not refused")]
    rows += [
        (_short(one.theirs), str(len(one.here)), str(len(one.lacking)), str(len(one.refused)), f"{one.share:.0f} %")
        for one in measured
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [" | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    ruler = " | ".join("-" * width for width in widths)
    return "\n".join(f"| {line} |" for line in [lines[0], ruler, *lines[1:]])


def as_page(measured: list[Covered], version: str) -> str:
    parts = [_HEAD.format(version=version, refresh=REFRESH), as_table(measured), *map(_section, measured)]
    return "\n\n".join(parts) + "\n"


_HEAD = """\
# What is here of PyTorch's test kit

Compared with torch {version}: the public names that each module defines, or hands on from another one of the kit.
`{refresh}` writes this page and [coverage.json](coverage.json) anew; a test fails while
they are out of date. What is lacking still works in a drop-in run, where PyTorch's own is used; see
[upstream.md](upstream.md)."""


def _section(one: Covered) -> str:
    parts = [f"## {_short(one.theirs)}"]
    if one.lacking:
        parts.append(f"Lacking: {_listed(one.lacking)}")
    parts += [f"Refused, {reason}: {_listed(refused)}" for reason, refused in _by_reason(one)]
    return "\n\n".join(parts if len(parts) > 1 else [*parts, "All of it is here."])


def _by_reason(one: Covered) -> Iterator[tuple[str, list[str]]]:
    for reason in dict.fromkeys(one.refused.values()):
        yield reason, [name for name, why in one.refused.items() if why == reason]


def _listed(found: list[str]) -> str:
    return ", ".join(f"`{name}`" for name in found)


def _short(module: str) -> str:
    return module.removeprefix(f"{THEIR_KIT}.")


def write(measured: list[Covered], version: str, directory: Path) -> None:
    (directory / PAGE).write_text(as_page(measured, version), encoding="utf-8")
    (directory / DATA).write_text(as_json(measured, version), encoding="utf-8")


def outdated(measured: list[Covered], version: str, directory: Path) -> list[str]:
    """In what the kept data differ. With another torch, in what both versions know: a name that we have or refuse
    does not depend on it."""
    kept = json.loads((directory / DATA).read_text(encoding="utf-8"))
    if kept["torch"] == version:
        same = (directory / PAGE).read_text(encoding="utf-8") == as_page(measured, version)
        return [] if same and kept == as_data(measured, version) else [f"{PAGE} or {DATA} is not what would be written"]
    now, then = _states(as_data(measured, version)), _states(kept)
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

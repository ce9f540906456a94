"""Compare PyTorch's test kit with ours, for several versions of torch, and write docs/contribute/coverage.md.

    python docs/tools/kit_coverage.py [--pytorch DIR]... [--record] [--json | --write DIR]

Whether we have or refuse a name does not depend on the version.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import kit_names
import refused_names
from kit_names import Kits

from torch_testing_ext.upstream.mapping import MIRRORED, THEIR_KIT, MirroredModule, UserError, installed_torch

PAGE = "coverage.md"
PROGRAM = "python docs/tools/kit_coverage.py"
REFRESH = f"{PROGRAM} --write docs/contribute"


@dataclass
class ModuleCoverage:
    """The public names of one module of PyTorch's, by whether we have them."""

    theirs: str
    ours: str
    here: list[str] = field(default_factory=list)
    lacking: list[str] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)  # name -> reason
    versions: dict[str, list[str]] = field(default_factory=dict)  # of torch, for names that not all of them have

    def counts(self, version: str) -> tuple[int, int, int]:
        """How many of the names of this version are present, missing and refused."""
        groups = (self.here, self.lacking, self.refused)
        present, missing, refused = (
            sum(version in self.versions.get(name, [version]) for name in group) for group in groups
        )
        return present, missing, refused


def measure(kits: Kits) -> list[ModuleCoverage]:
    """Compare our modules with those of each version of torch."""
    known = {module for kit in kits.values() for module in kit}
    return [_measure(pair, kits) for pair in MIRRORED if pair.theirs in known]


def _measure(pair: MirroredModule, kits: Kits) -> ModuleCoverage:
    covered = ModuleCoverage(pair.theirs, pair.ours)
    ours = importlib.import_module(pair.ours)
    found = {version: kits[version].get(pair.theirs, frozenset()) for version in kit_names.in_order(kits)}
    for name in sorted(frozenset.union(*found.values())):
        versions = [version for version, has in found.items() if name in has]
        if len(versions) < len(found):
            covered.versions[name] = versions
        if hasattr(ours, name):
            covered.here.append(name)
        elif reason := refused_names.reason_of(name):
            covered.refused[name] = reason
        else:
            covered.lacking.append(name)
    return covered


# -- output


def as_data(measured: list[ModuleCoverage], versions: Sequence[str]) -> dict[str, Any]:
    modules = {
        one.theirs: {
            "ours": one.ours,
            "here": one.here,
            "lacking": one.lacking,
            "refused": one.refused,
            "versions": one.versions,
        }
        for one in measured
    }
    return {"torch": list(versions), "modules": modules}


def as_json(measured: list[ModuleCoverage], versions: Sequence[str]) -> str:
    return json.dumps(as_data(measured, versions), indent=1, ensure_ascii=False) + "\n"


def as_table(measured: list[ModuleCoverage], versions: Sequence[str]) -> str:
    """The numbers, one line per module and one column per version."""
    rows = [(f"module of {THEIR_KIT}", *(f"torch {version}" for version in versions))]
    rows += [(_short(one.theirs), *(_cell(one.counts(version)) for version in versions)) for one in measured]
    totals = [
        [sum(numbers) for numbers in zip(*(one.counts(version) for one in measured), strict=True)]
        for version in versions
    ]
    rows.append(("all", *map(_cell, totals)))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [" | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    ruler = " | ".join("-" * width for width in widths)
    return "\n".join(f"| {line} |" for line in [lines[0], ruler, *lines[1:]])


def _cell(counts: Sequence[int]) -> str:
    return " / ".join(map(str, counts))


def as_page(measured: list[ModuleCoverage], versions: Sequence[str]) -> str:
    head = _HEAD.format(first=versions[0], last=versions[-1], refresh=REFRESH)
    return "\n\n".join([head, as_table(measured, versions), *map(_section, measured)]) + "\n"


_HEAD = """\
# Coverage of PyTorch's test kit

This page compares our modules with those of torch {first} to {last}. It counts the public names that each module
defines or re-exports from another module of the kit: how many are present here, missing, and refused for a reason.
Missing and refused names still work in a drop-in run, which uses PyTorch's own: see
[PyTorch's own tests](../migrate/pytorch.md). A version in parentheses means that not every torch compared here has the
name.

A test fails while this page is out of date. To update it, run `{refresh}`."""


def _section(one: ModuleCoverage) -> str:
    parts = [f"## {_short(one.theirs)}"]
    if one.lacking:
        parts.append(f"Missing: {_listed(one, one.lacking)}")
    parts += [f"Refused ({reason}): {_listed(one, refused)}" for reason, refused in _by_reason(one)]
    return "\n\n".join(parts if len(parts) > 1 else [*parts, "Every name is present."])


def _by_reason(one: ModuleCoverage) -> Iterator[tuple[str, list[str]]]:
    for reason in dict.fromkeys(one.refused.values()):
        yield reason, [name for name, why in one.refused.items() if why == reason]


def _listed(one: ModuleCoverage, found: list[str]) -> str:
    return ", ".join(f"`{name}`{_where(one.versions.get(name, []))}" for name in found)


def _where(versions: list[str]) -> str:
    return f" ({', '.join(versions)})" if versions else ""


def _short(module: str) -> str:
    return module.removeprefix(f"{THEIR_KIT}.")


def is_outdated(measured: list[ModuleCoverage], versions: Sequence[str], directory: Path) -> bool:
    """Does the stored page differ from these?"""
    return (directory / PAGE).read_text(encoding="utf-8") != as_page(measured, versions)


# -- the command


def main(argv: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(argv)
    try:
        _run(options)
    except UserError as error:
        print(f"{PROGRAM}: {error}", file=sys.stderr)
        return 2
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=PROGRAM,
        description="Compare the public names of PyTorch's test kit with ours: present, missing or refused. Several "
        "versions of torch are shown side by side.",
    )
    parser.add_argument(
        "--pytorch",
        type=Path,
        action="append",
        metavar="DIR",
        help="compare with a checkout, or with the directory where a torch is installed; may be repeated "
        "(default: the recorded versions, and the installed torch)",
    )
    parser.add_argument(
        "--record", action="store_true", help="record the names of --pytorch, or of the installed torch"
    )
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print all names as JSON")
    form.add_argument("--write", type=Path, metavar="DIR", help=f"write {PAGE} to DIR")
    return parser


def _run(options: argparse.Namespace) -> None:
    roots = options.pytorch or [installed_torch()]
    kits = {kit_names.version_of(root): kit_names.read_sources(root) for root in roots}
    if options.record:
        kit_names.record(kits)
    if options.pytorch is None or options.record:
        kits = {**kits, **kit_names.recorded()}
    measured, versions = measure(kits), kit_names.in_order(kits)
    if options.write is not None:
        (options.write / PAGE).write_text(as_page(measured, versions), encoding="utf-8")
    else:
        print(as_json(measured, versions) if options.json else as_table(measured, versions))


if __name__ == "__main__":
    sys.exit(main())

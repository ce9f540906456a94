"""Bring test files of PyTorch's here: `python -m torch_testing_ext.upstream import FILE... [--to test/]`."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from . import places
from .mapping import PACKAGE, Mistake, Side, module_on, moved, source_of
from .rewriting import STAR, Rewritten, Use, only_of_their_side, rewrite


@dataclass(frozen=True)
class Incoming:
    file: Path
    target: Path
    rewritten: Rewritten

    def remarks(self) -> Iterator[str]:
        """What keeps the file from running here as it does there."""
        yield from self.rewritten.notes
        for use in self.rewritten.uses:
            if use.name in ("", STAR):
                continue
            if not _has(use):
                where = moved(f"{module_on(Side.THEIRS, use.module)}.{use.name}")
                yield f"line {use.line}: {use.module} has no {use.name}" + (f" ({where})" if where else "")
        for use in only_of_their_side(self.rewritten.uses, Side.OURS):
            dotted = f"{use.module}.{use.name}".rstrip(".")
            yield f"line {use.line}: {dotted} stays PyTorch's: it has no counterpart here"


def _has(use: Use) -> bool:
    if source_of(use.module, PACKAGE.parent) is None:
        return True  # not a module of ours: told of elsewhere
    return hasattr(importlib.import_module(use.module), use.name)


def bring(files: Sequence[Path], to: Path, force: bool = False) -> list[Incoming]:
    """Write the files below `to`: all, or none where one of them cannot be."""
    incoming = [Incoming(file, to / places.below_tests(file), _rewritten(file)) for file in files]
    for one in incoming:
        there = one.target.exists() and one.target.read_bytes() != one.rewritten.source
        if there and not force:
            raise Mistake(f"{one.target} is there already and is another: move it away, or say --force")
    for one in incoming:
        one.target.parent.mkdir(parents=True, exist_ok=True)
        one.target.write_bytes(one.rewritten.source)
    return incoming


def _rewritten(file: Path) -> Rewritten:
    return rewrite(places.read(file), Side.OURS, file)

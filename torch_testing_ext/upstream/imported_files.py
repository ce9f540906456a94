"""Imports test files from PyTorch: `python -m torch_testing_ext.upstream import FILE... [--to test/]`.

Each file is rewritten to our imports.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from .mapping import PACKAGE, Side, UserError, module_on, moved_name, source_of
from .rewriting import STAR, RewrittenFile, Use, only_of_their_side, rewrite_file

TESTS = "test"


def below_tests(file: Path) -> Path:
    """A file's path below its checkout's `test/`; outside a checkout, below the innermost directory named `test`."""
    path = file.resolve()
    for root in path.parents:
        tests = root / TESTS
        if (root / ".git").exists() and path.is_relative_to(tests):
            return path.relative_to(tests)
    for folder in path.parents:
        if folder.name == TESTS:
            return path.relative_to(folder)
    return Path(path.name)


def read_file(file: Path) -> bytes:
    """The content of a file that the user named."""
    if not file.is_file():
        raise UserError(f"{file} does not exist")
    return file.read_bytes()


@dataclass(frozen=True)
class ImportedFile:
    """A PyTorch test file, rewritten for this tree, and the path it gets here."""

    file: Path
    target: Path
    rewritten: RewrittenFile

    def problems(self) -> Iterator[str]:
        """The differences that keep the file from running here as it does in PyTorch."""
        yield from self.rewritten.notes
        for use in self.rewritten.uses:
            if use.name not in ("", STAR) and not _is_here(use):
                theirs = module_on(Side.THEIRS, use.module)
                where = moved_name(f"{theirs}.{use.name}")
                hint = f" ({where})" if where else ""
                yield f"line {use.line}: {use.module} has no {use.name}{hint}"
        for use in only_of_their_side(self.rewritten.uses, Side.OURS):
            dotted = f"{use.module}.{use.name}".rstrip(".")
            yield f"line {use.line}: {dotted} stays PyTorch's, since it has no counterpart here"


def _is_here(use: Use) -> bool:
    # If it is no module of ours, only_of_their_side reports it.
    if source_of(use.module, PACKAGE.parent) is None:
        return True
    module = importlib.import_module(use.module)
    return hasattr(module, use.name)


def import_files(files: Sequence[Path], to: Path, force: bool = False) -> list[ImportedFile]:
    """Write the rewritten files below `to`: all of them, or none if one cannot be written."""
    imported = []
    for path in files:
        rewritten = rewrite_file(read_file(path), Side.OURS, path)
        imported.append(ImportedFile(path, to / below_tests(path), rewritten))
    for file in imported:
        differs = file.target.exists() and file.target.read_bytes() != file.rewritten.source
        if differs and not force:
            raise UserError(f"{file.target} already exists and differs: move it away, or use --force")
    for file in imported:
        file.target.parent.mkdir(parents=True, exist_ok=True)
        file.target.write_bytes(file.rewritten.source)
    return imported

"""The files that pytest collects: paths with odd names, and the collectors of one file."""

from __future__ import annotations

import dataclasses
import os
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest


@contextmanager
def whole_paths() -> Iterator[None]:
    """Let arguments that are paths of files and folders mean these, whatever their names are.

    pytest reads `[` and `::` as the beginning of a test's name, wherever they are.
    """
    # Its parameters differ between versions.
    main: Any = sys.modules[pytest.Session.__module__]
    original = main.resolve_collection_argument

    def resolve(invocation_path: Path, argument: str, *more: Any, **options: Any) -> Any:
        parts = str(argument).split("::")
        paths = ["::".join(parts[:length]) for length in range(len(parts), 0, -1)]
        existing = next((path for path in paths if (invocation_path / path).exists()), "")
        if "[" not in existing and "::" not in existing:
            return original(invocation_path, argument, *more, **options)
        test = str(argument).removeprefix(existing)
        path = invocation_path / existing
        # Any file that exists.
        resolved: Any = original(invocation_path, f"{os.devnull if path.is_file() else os.sep}{test}", *more, **options)
        if isinstance(resolved, tuple):
            return (path, *resolved[1:])
        return dataclasses.replace(resolved, path=path)

    main.resolve_collection_argument = resolve
    try:
        yield
    finally:
        main.resolve_collection_argument = original


def leads_to(path: Path, file: Path) -> bool:
    """Whether a collection that may only look at this path can come to the file."""
    if path == file or path in file.parents:
        return True
    # Before version 8, this file stands for its folder.
    return not hasattr(pytest, "Directory") and path.name == "__init__.py" and path.parent in file.parents


def is_file(collector: Any) -> bool:
    """Whether a collector is of one file. Before version 8, one of a package is of a file, too."""
    return isinstance(collector, pytest.File) and not isinstance(collector, pytest.Package)


def imported_module(collector: Any) -> types.ModuleType | None:
    """The module of a collector, if it has been imported: its public name `obj` would import it."""
    module = getattr(collector, "_obj", None)
    return module if isinstance(module, types.ModuleType) else None

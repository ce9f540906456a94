"""Data that one run keeps for the next: small JSON files, which two runs may update at the same time without loss.

Nothing here can fail a run: a file that cannot be read or written causes a warning and counts as empty.
"""

from __future__ import annotations

import fcntl
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch_testing_ext._process.whole_files import write_atomically

FORMAT = "torch_testing_ext 1"
Warn = Callable[[str], None]


class Remembered:
    """A JSON file with one value per test."""

    def __init__(self, folder: Path, name: str, is_value: Callable[[Any], bool], warn: Warn):
        self._file, self._is_value, self._warn = folder / f"{name}.json", is_value, warn

    def load(self) -> dict[str, Any]:
        """The value of each test; empty if the file is missing or invalid."""
        try:
            return self._checked(json.loads(self._file.read_text(encoding="utf-8")))
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, RecursionError) as error:
            self._warn(f"{self._file} is ignored: {error or type(error).__name__}")
            return {}

    def update(self, change: Callable[[dict[str, Any]], None]) -> None:
        """Applies `change` to the current content, which another run may have updated meanwhile, in one step."""
        try:
            with self._locked():
                values = self.load()
                change(values)
                write_atomically(
                    self._file, json.dumps({"format": FORMAT, "tests": dict(sorted(values.items()))}, indent=0)
                )
        except OSError as error:
            self._warn(f"{self._file} was not updated: {error}")

    def _checked(self, content: Any) -> dict[str, Any]:
        if not isinstance(content, dict) or content.get("format") != FORMAT:
            raise ValueError(f"its format is not {FORMAT!r}")
        tests = content.get("tests")
        if not isinstance(tests, dict) or not all(map(self._is_value, tests.values())):
            raise ValueError("its values for tests are invalid")
        return tests

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Locks a separate file, since the file itself is replaced. The lock ends with the process that holds it."""
        make_cache_folder(self._file.parent)
        with self._file.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield


def make_cache_folder(folder: Path) -> None:
    """Creates the folder with a .gitignore that hides it from git."""
    if not folder.is_dir():
        folder.mkdir(parents=True, exist_ok=True)
        (folder / ".gitignore").write_text("*\n", encoding="utf-8")

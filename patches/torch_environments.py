"""Installed versions of torch: that of this environment, and those of environments beside it or named by path."""

import os
import re
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from torch_testing_ext.upstream.mapping import UserError, installed_torch


@dataclass(frozen=True)
class TorchEnvironment:
    """A Python interpreter and the package torch that it imports."""

    python: str
    package: Path

    @property
    def version(self) -> str:
        return version_of(self.package)


def version_of(package: Path) -> str:
    """The major and minor version of a torch package, such as "2.13"."""
    found = re.search(r"__version__ = '(\d+\.\d+)", (package / "version.py").read_text())
    if found is None:
        raise UserError(f"{package}/version.py does not tell the version of torch")
    return found[1]


def this_environment() -> TorchEnvironment:
    return TorchEnvironment(sys.executable, installed_torch() / "torch")


def find(word: str) -> TorchEnvironment:
    """The environment that a user means by a version, such as "2.13", or by the path of it or of its interpreter."""
    if not re.fullmatch(r"\d+\.\d+", word):
        path = Path(word)
        found = _at(path.parents[1] if path.is_file() and len(path.parents) > 1 else path)
        if found is None:
            raise UserError(f"{word} is neither a version of torch, such as 2.13, nor an environment that has torch")
        return found
    known: dict[str, TorchEnvironment] = {}
    for environment in _beside_this_one():
        known.setdefault(environment.version, environment)
    if word not in known:
        have = ", ".join(f"{version} ({each.python})" for version, each in known.items()) or "none"
        raise UserError(f"torch {word} was not found. Name its environment by path. These versions were found: {have}")
    return known[word]


def _beside_this_one() -> Iterator[TorchEnvironment]:
    with suppress(UserError):
        yield this_environment()
    for folder in sorted(Path(sys.prefix).resolve().parent.iterdir()):
        if found := _at(folder):
            yield found


def _at(folder: Path) -> TorchEnvironment | None:
    """The environment in a folder, if that is one and has torch."""
    python = folder / "bin" / "python"
    packages = sorted(folder.glob("lib/python*/site-packages/torch"))
    # Not python.exists(): it raises an error for a folder that this user may not read.
    usable = os.path.exists(python) and packages and (packages[0] / "version.py").is_file()
    return TorchEnvironment(str(python.absolute()), packages[0]) if usable else None

"""The description of one unit that run_test.py sends to the unit's processes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from torch_testing_ext._process import messages


@dataclass(frozen=True)
class LoadAs:
    """The way in which a test file is loaded."""

    by_pytest: bool = False  # pytest imports it, even if its source does not look as if it had tests for pytest
    all_marks: bool = False  # it has the tests, too, that pytest's own options deselect by their marks


@dataclass(frozen=True)
class UnitSpec:
    """The tests of a unit, their time-outs, and the places of its files."""

    number: int
    file: str  # absolute
    load_as: LoadAs
    root: str  # the working directory of the commands
    tests: tuple[str, ...]  # `Class.test_x`
    timeouts: tuple[float, ...]  # of each test
    commands: tuple[str, ...]  # that run each of them alone
    directory: str
    ranks_in: str  # holds a directory for each test that starts ranks
    environ: Mapping[str, str]  # variables that differ from those of the run

    @property
    def log(self) -> Path:
        """The output of the unit's own process."""
        return Path(self.directory, "log")

    @property
    def stacks(self) -> Path:
        return Path(self.directory, "stacks")

    @property
    def broke(self) -> Path:
        """The last message of a worker that cannot send it any more."""
        return Path(self.directory, "broke")

    @property
    def session(self) -> Path:
        """The directory of the launch layer."""
        return Path(self.directory, "session")

    @property
    def ranks(self) -> Path:
        return Path(self.ranks_in)

    def save(self) -> Path:
        """Write the specification to a file, for a worker that is a new interpreter."""
        file = Path(self.directory, "unit")
        file.write_text(messages.to_json(self))
        return file

    @classmethod
    def load(cls, file: Path) -> UnitSpec:
        spec: UnitSpec = messages.from_json(file.read_text(), messages.by_name(cls))
        return spec

"""One unit as its processes get it: data that crosses from run_test.py to where the unit runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from torch_testing_ext._process import messages


@dataclass(frozen=True)
class UnitSpec:
    """The tests of a unit, how long each may take, and where files about it are."""

    number: int
    file: str  # absolute
    root: str  # where commands are run from
    tests: tuple[str, ...]  # `Class.test_x`
    timeouts: tuple[float, ...]  # of each test
    commands: tuple[str, ...]  # that run each of them alone
    directory: str
    ranks_in: str  # holds a directory for each test that starts ranks
    environ: Mapping[str, str]  # what differs from the run's own

    @property
    def log(self) -> Path:
        """What the unit's own process prints."""
        return Path(self.directory, "log")

    @property
    def stacks(self) -> Path:
        return Path(self.directory, "stacks")

    @property
    def session(self) -> Path:
        """The directory of the launch layer."""
        return Path(self.directory, "session")

    @property
    def ranks(self) -> Path:
        return Path(self.ranks_in)

    def save(self) -> Path:
        """Write it to a file, for a worker that is a new interpreter."""
        file = Path(self.directory, "unit")
        file.write_text(messages.to_json(self))
        return file

    @classmethod
    def load(cls, file: Path) -> UnitSpec:
        spec: UnitSpec = messages.from_json(file.read_text(), messages.by_name(cls))
        return spec

"""The description of one unit, for the processes that run it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from torch_testing_ext._process import messages, terminal
from torch_testing_ext.runner.load_as import LoadAs


@dataclass(frozen=True)
class UnitSpec:
    """The tests of a unit, their time-outs, and the places of its files."""

    number: int
    file: str  # absolute
    load_as: LoadAs
    root: str  # the working directory of the commands
    tests: tuple[str, ...]  # `Class.test_x`
    timeouts: tuple[float, ...]  # the time-out of each test
    commands: tuple[str, ...]  # that run each of them alone
    show_commands: tuple[str, ...]  # that show the account of its failure
    directory: Path
    ranks: Path  # holds a directory for each test that starts ranks
    environ: Mapping[str, str]  # variables that differ from those of the run

    @property
    def variables(self) -> dict[str, str]:
        """The variables in the form of `os.environ`: names of tests may have letters that the locale lacks."""
        return {name: terminal.to_variable(text) for name, text in self.environ.items()}

    @property
    def log(self) -> Path:
        """The output of the unit's own process."""
        return self.directory / "log"

    @property
    def stacks(self) -> Path:
        return self.directory / "stacks"

    @property
    def broke(self) -> Path:
        """The last message of a worker that cannot send it any more."""
        return self.directory / "broke"

    @property
    def reads(self) -> Path:
        """The record of the files that its processes read."""
        return self.directory / "reads"

    @property
    def session(self) -> Path:
        """The directory of the launch layer."""
        return self.directory / "session"

    def save(self) -> Path:
        """Write the specification to a file, for a worker that is a new interpreter."""
        file = self.directory / "unit"
        file.write_text(messages.to_json(self), encoding="utf-8")
        return file

    @classmethod
    def load(cls, file: Path) -> UnitSpec:
        spec: UnitSpec = messages.from_json(file.read_text(encoding="utf-8"), messages.by_name(cls))
        return spec

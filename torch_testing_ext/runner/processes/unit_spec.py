"""What a unit's processes are told: data that crosses from run_test.py to where the unit runs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class UnitSpec:
    number: int
    file: str  # absolute
    root: str  # where commands are given from
    tests: tuple[str, ...]  # `Class.test_x`
    timeouts: tuple[float, ...]  # of each test
    commands: tuple[str, ...]  # that run each of them alone
    directory: str
    ranks_in: str  # a directory for each test that starts ranks
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
        """The launch layer's own."""
        return Path(self.directory, "session")

    @property
    def ranks(self) -> Path:
        return Path(self.ranks_in)

    def as_data(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def of_data(cls, data: Mapping[str, Any]) -> UnitSpec:
        fields: dict[str, Any] = {}
        for name, value in data.items():
            fields[name] = tuple(value) if isinstance(value, list) else value
        return cls(**fields)

    def save(self) -> Path:
        file = Path(self.directory, "order")
        file.write_text(json.dumps(self.as_data()))
        return file

    @classmethod
    def load(cls, file: Path) -> UnitSpec:
        return cls.of_data(json.loads(file.read_text()))

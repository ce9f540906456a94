"""Lanes: when the collectives of ranks began and ended, for reports that draw them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from torch_testing_ext._process.declarations import AskedOptions, Level, Option, Setting, either
from torch_testing_ext._process.setting_readers import read_path
from torch_testing_ext.launch.aspect import Aspect
from torch_testing_ext.launch.host_kinds import HostKind

if TYPE_CHECKING:
    from torch_testing_ext.launch.attempts import RankAttempt
    from torch_testing_ext.launch.jobs import Job

# Ranks that pass write them, too.
LANES = Setting("_TORCH_TESTING_EXT_LANES", "0 or 1", either("0", "1"), False)
PERFETTO = Option(
    "perfetto",
    "output",
    read_path,
    "write a timeline for Perfetto",
    "FILE",
    kind=Path | None,
    level=Level.HELP_ALL,
    in_command=False,
)


class Lanes(Aspect):
    """Has every rank keep its collectives, for a timeline."""

    name = "lanes"
    is_always_on = False
    gaps = MappingProxyType(
        {
            HostKind.OWN: "such a rank leaves no account of its time",
            HostKind.THREADS: "threads leave no files",
            HostKind.TORCHRUN: "torchrun starts the ranks, and when they began is not known",
            HostKind.LAUNCHED: "the ranks of a launcher began before the test",
        }
    )
    options = (PERFETTO,)
    settings = (LANES,)

    def variables(self, asked: AskedOptions, repetition: int = 0, command: str = "") -> Mapping[str, str]:
        return {} if asked.value(PERFETTO) is None else {LANES.name: "1"}

    def complete_job(self, attempt: RankAttempt, job: Job) -> Job:
        from dataclasses import replace

        return replace(job, keeps_lanes=LANES.value())


LANES_OF_RANKS = Lanes()

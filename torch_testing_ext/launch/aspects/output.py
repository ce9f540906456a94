"""The output of ranks: whether it is shown while they run, and where their files stay."""

from __future__ import annotations

import os
from types import MappingProxyType
from typing import TYPE_CHECKING

from torch_testing_ext._process.declarations import AskedOptions, Level, Option, Setting, either
from torch_testing_ext._process.setting_readers import read_boolean
from torch_testing_ext.launch.aspect import Aspect
from torch_testing_ext.launch.host_kinds import HostKind
from torch_testing_ext.launch.start_settings import LOGS, SHOWLOCALS

if TYPE_CHECKING:
    from torch_testing_ext.launch.attempts import RankAttempt
    from torch_testing_ext.launch.jobs import Job


STREAM = Setting("TORCH_TESTING_EXT_STREAM", "0 or 1", either("0", "1"), False)
SHOWN = Option(
    "stream",
    "output",
    read_boolean,
    "show the output of tests while they run",
    kind=bool,
    default=False,
    setting=STREAM,
    variable=STREAM.name,
    also=("-s",),
    in_command=False,
)
# pytest has an option of this name, from which its plugin sets the variable.
_LOCALS = Option(
    "showlocals",
    "output",
    read_boolean,
    "show local variables in failures",
    kind=bool,
    default=False,
    setting=SHOWLOCALS,
    variable=SHOWLOCALS.name,
    level=Level.HELP_ALL,
    also=("-l",),
    in_command=False,
)


class OutputOfRanks(Aspect):
    """Shows the output of ranks while they run, and local variables in failures, if the user wants that."""

    name = "output"
    is_always_on = False
    gaps = MappingProxyType(
        {
            HostKind.OWN: "the class starts its ranks, which write where it writes",
            HostKind.THREADS: "threads write where their process writes",
            HostKind.TORCHRUN: "what torchrun and its ranks write is shown when they have ended",
            HostKind.LAUNCHED: "the launcher shows what its processes write",
        }
    )
    options = (SHOWN, _LOCALS)
    settings = (LOGS,)

    def begin(self, asked: AskedOptions, runs_tests: bool) -> None:
        if asked.value(_LOCALS):
            # Tests without ranks show them, too.
            os.environ["PYTEST_ADDOPTS"] = f"{os.environ.get('PYTEST_ADDOPTS', '')} --showlocals".strip()

    def complete_job(self, attempt: RankAttempt, job: Job) -> Job:
        from dataclasses import replace

        return replace(job, stream=STREAM.value())


OUTPUT = OutputOfRanks()

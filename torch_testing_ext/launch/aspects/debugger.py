"""The debugger: which rank has the user's terminal, and when it stops there."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from torch_testing_ext._process.declarations import AskedOptions, Option, Setting, number
from torch_testing_ext._process.setting_readers import read_boolean
from torch_testing_ext._process.terminal import NAME_OF_TEST, TERMINAL_VARIABLE, UserTerminal
from torch_testing_ext.launch.aspect import Aspect
from torch_testing_ext.launch.host_kinds import HostKind

if TYPE_CHECKING:
    from torch_testing_ext.launch.attempts import RankAttempt
    from torch_testing_ext.launch.jobs import Job


def _read_rank(text: str) -> int:
    if not (text.isascii() and text.isdecimal()):
        raise ValueError(f"{text!r} is not a rank: 0, 1, 2 ...")
    return int(text)


DEBUG_RANK: Setting[int | None] = Setting("TORCH_TESTING_EXT_DEBUG_RANK", "a rank: 0, 1, 2 ...", number, None)
_APART = {"cluster": "tests on a cluster have no terminal"}
_PDB = Option(
    "pdb",
    "diagnosis",
    read_boolean,
    "open pdb where a rank fails",
    kind=bool,
    default=False,
    apart=_APART,
    # Any rank can have the terminal.
    variable=DEBUG_RANK.name,
    of_variable=bool,
    configurable=False,
    in_command=False,
)
_TRACE = Option(
    "trace",
    "diagnosis",
    _read_rank,
    "stop in pdb at the first line (default: rank 0)",
    "RANK",
    kind=int | None,
    apart=_APART,
    alone="0",
    configurable=False,
    in_command=False,
)
RANK = Option(
    "debug_rank",
    "debugging",
    _read_rank,
    metavar="RANK",
    kind=int,
    default=0,
    in_runner=False,
    instead="--trace=RANK",
    pytest_help="the rank that breakpoint(), --pdb and --trace debug (default for the last two: 0), without a time "
    "limit",
)


class Debugger(Aspect):
    """Gives a rank the user's terminal."""

    name = "debugger"
    gaps = MappingProxyType(
        {
            HostKind.OWN: "the class starts its ranks, which have no terminal",
            HostKind.TORCHRUN: "torchrun starts the ranks, which have no terminal",
        }
    )
    options = (_PDB, _TRACE, RANK)
    settings = (DEBUG_RANK,)

    def implied(self, asked: AskedOptions) -> Mapping[str, Any]:
        # One test at a time.
        return {_PDB.field: True, "jobs": 1} if asked.value(_PDB) or asked.value(_TRACE) is not None else {}

    def takes_terminal(self, asked: AskedOptions) -> bool:
        return asked.value(_PDB)

    def require(self, asked: AskedOptions) -> None:
        why_not = UserTerminal.here().why_not if asked.value(_PDB) else ""
        if why_not:
            flag = (_PDB if asked.value(_TRACE) is None else _TRACE).flag
            raise ValueError(f"{flag} cannot stop: {why_not}")

    def variables(self, asked: AskedOptions, repetition: int = 0, command: str = "") -> Mapping[str, str]:
        """The place at which processes of tests find the user's terminal, or why they have none."""
        from dataclasses import replace

        terminal = UserTerminal(why_not=f"run it with a debugger: {command} {_PDB.flag} {NAME_OF_TEST}")
        if asked.value(_PDB):
            terminal = replace(UserTerminal.here(), stop_in=asked.value(_TRACE))
        return {TERMINAL_VARIABLE: terminal.written(), DEBUG_RANK.name: ""}

    def prepare(self, attempt: RankAttempt) -> None:
        # A rank in the debugger takes as long as the user wants.
        attempt.is_endless = DEBUG_RANK.value() is not None

    def complete_job(self, attempt: RankAttempt, job: Job) -> Job:
        from dataclasses import replace

        terminal = UserTerminal.here()
        file = None if job.subject is None else job.subject.file
        expects = terminal.expects_stops(file)
        return replace(job, debug_rank=DEBUG_RANK.value(), terminal=terminal, expects_stops=expects)


DEBUGGER = Debugger()

"""Scripts in ranks that torchrun starts, and what these leave to be compared."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from torch_testing_ext import launch
from torch_testing_ext._collectives.findings.finding import Finding
from torch_testing_ext._collectives.findings.mismatches import first_mismatch
from torch_testing_ext._collectives.records.raw_records import RawRecord, unpack_record
from torch_testing_ext._collectives.sanitizer.sanitizer_kinds import SanitizeKind
from torch_testing_ext._process import ends, messages, system, user_commands
from torch_testing_ext._process.logs import cut_middle
from torch_testing_ext._process.words import list_of
from torch_testing_ext._testing.bases import ranked_test_case
from torch_testing_ext._testing.bases.limited_commands import CommandEnd, run_limited
from torch_testing_ext._testing.bases.rank_verdicts import RankError
from torch_testing_ext._tests.launcher_variables import without_launch
from torch_testing_ext.launch.attempts import Host, RankAttempt, RanksEnd
from torch_testing_ext.launch.host_kinds import HostKind
from torch_testing_ext.launch.jobs import Sanitize, log_of
from torch_testing_ext.launch.logs_of_ranks import Logs, records_of
from torch_testing_ext.launch.rank_variables import for_gloo
from torch_testing_ext.launch.user_warnings import say_once, show_to_user
from torch_testing_ext.launch.watching.evidence import RankEvidence, with_collectives

# Keeps these frames out of tracebacks: the message is complete.
__unittest = True
# The same in pytest.
__tracebackhide__ = True


LONGEST_OUTPUT = 20_000


_END_OF_TORCHRUN = 5.0


class TorchrunRanks(Host):
    """A script in ranks that torchrun starts. Their collectives are compared once torchrun has ended."""

    kind = HostKind.TORCHRUN

    def __init__(self, script: Path, words: Sequence[str], env: Mapping[str, str]):
        self._script = script
        self._words = words
        self._env = env
        # One text of all ranks.
        self.outputs: tuple[str, ...] = ()

    def start(self, attempt: RankAttempt) -> None:
        """Choose the checks that such ranks can have: all of them get the hash seed of torchrun."""
        if SanitizeKind.HASH in attempt.sanitize.kinds:
            say_once("ranks that torchrun starts are not checked for: hash")
            attempt.sanitize = replace(attempt.sanitize, kinds=attempt.sanitize.kinds - {SanitizeKind.HASH})
        attempt.equip()

    def judge(self, attempt: RankAttempt) -> RanksEnd:
        """Run torchrun, and judge what its ranks have left. Raises an error with the output if it fails."""
        launch.keep_directory()
        script, size, directory = self._script, attempt.plan.world_size, attempt.directory
        began = launch.now()
        launcher = ("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={size}")
        wrapper = (str(Path(__file__).with_name("torchrun_rank.py")), str(directory))
        # By default, torchrun leaves a folder for logs behind.
        logs = f"--log-dir={directory / 'logs'}"
        of_rank = (*wrapper, messages.to_json(attempt.sanitize), str(script), *self._words)
        environ = {**without_launch({**os.environ, **attempt.environ}), **for_gloo(), **self._env}
        limit = attempt.plan.timeout or ranked_test_case.TIMEOUT_DEFAULT
        output, end = _output_of([sys.executable, *launcher, logs, *of_rank], environ, limit, directory / "output")
        left = _Left(directory, size, attempt.sanitize)
        if end.code != 0:
            finding = left.mismatch()
            why = f"\n\n{finding.text}" if finding is not None else ""
            rerun = user_commands.command(*launcher, str(script), *self._words)
            raise RankError(
                f"torchrun {end.how}: {script.name} in {size} ranks\n\n{cut_middle(output, LONGEST_OUTPUT)}{why}\n\n"
                f"To run it alone:\n  {rerun}"
            )
        self.outputs = (output,)
        print(output, end="")
        return left.judge(attempt.plan.case, launch.now() - began)


def _output_of(command: list[str], environ: Mapping[str, str], limit: float, log: Path) -> tuple[str, CommandEnd]:
    """Run torchrun; return its output, with that of its ranks, and how it ended."""
    with log.open("ab") as output:
        end = run_limited(command, limit, environ, output, _end_torchrun)
    return log.read_text(encoding="utf-8", errors="replace"), end


def _end_torchrun(process: subprocess.Popen[bytes]) -> None:
    """End torchrun, which ends its workers; then what is left of it and of them, which have sessions of their own.

    If torchrun has ended by itself, it has done that.
    """
    if process.returncode is not None:
        return
    workers = system.descendants(process.pid)
    ends.end(process, after_sigterm=_END_OF_TORCHRUN)
    started_since = [pid for worker in workers for pid in system.descendants(worker)]
    for pid in (*workers, *started_since):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


class _Left:
    """The files that ranks have left in the folder. A rank that did not come to Python's exit has left nothing."""

    def __init__(self, directory: Path, size: int, sanitize: Sanitize):
        self._ranks = range(size)
        self._note = sanitize.note
        self._logs = Logs([log_of(directory, rank) for rank in self._ranks], sanitize)
        self._unknown: list[int] = []
        self._left: list[RawRecord | None] = []
        for rank in self._ranks:
            files = list(directory.glob(f"rank{rank}.*.left"))
            # Of several processes with the number of a rank, it is not known which is the rank.
            if len(files) == 1:
                self._left.append(unpack_record(files[0].read_bytes()))
            else:
                self._unknown.append(rank)
                self._left.append(None)

    def mismatch(self) -> Finding | None:
        records = [raw.record(rank) for rank, raw in enumerate(self._left) if raw is not None]
        return first_mismatch(list(records_of(self._logs.read()).values()) or records)

    def judge(self, case: launch.Case, seconds: float) -> RanksEnd:
        """Judge ranks that have all passed."""
        if self._unknown:
            show_to_user(
                f"{case.name}: the collectives of {list_of(self._unknown)} were not compared with those of others: "
                "Python did not end there by itself"
            )
        reports = [launch.RankReport(rank, launch.RankEnding.PASSED, seconds, launch.now()) for rank in self._ranks]
        reports = with_collectives(reports, self._logs, self._left)
        evidence = RankEvidence(tuple(reports), note=self._note)
        return RanksEnd(evidence.reports, evidence.verdict(case))

"""Scripts in ranks that torchrun starts: what these have issued is compared once torchrun has ended."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from torch_testing_ext import launch
from torch_testing_ext._collectives.findings import Finding, first_mismatch
from torch_testing_ext._collectives.raw import RawRecord, unpack
from torch_testing_ext._collectives.records import list_of
from torch_testing_ext._process import messages, reaping, shell, system
from torch_testing_ext._process.logs import cut_middle
from torch_testing_ext._sanitizer.kinds import SanitizeKind
from torch_testing_ext.launch.job import Sanitize, log_of
from torch_testing_ext.launch.judging import judge
from torch_testing_ext.launch.rank_report import add_recorders
from torch_testing_ext.launch.sanitizer_logs import Logs, records_of

from . import ranked
from .rank_checks import sanitize_with
from .verdicts import RankError, raise_verdict, say, say_once

__unittest = True
__rank_frame__ = True

LONGEST_OUTPUT = 20_000
_END_TIMEOUT = 5.0


def run(script: Path, words: list[str], size: int, env: Mapping[str, str], timeout: float | None) -> str:
    """Run a script under torchrun; return its output. Raises the verdict on its ranks, unless all pass."""
    __tracebackhide__ = True
    sanitize = sanitize_with(())
    if SanitizeKind.HASH in sanitize.kinds:
        say_once("ranks that torchrun starts are not checked for: hash")
        sanitize = replace(sanitize, kinds=sanitize.kinds - {SanitizeKind.HASH})
    directory = launch.new_directory(script.name)
    began = launch.now()
    try:
        output, how = _output_of(script, words, size, env, timeout or ranked.TIMEOUT_DEFAULT, directory, sanitize)
        left = _Left(directory, size, sanitize)
        if how != reaping.describe_exit(0):
            finding = left.mismatch()
            why = f"\n\n{finding.text}" if finding is not None else ""
            again = shell.join(["torchrun", f"--nproc-per-node={size}", str(script), *words])
            raise RankError(
                f"torchrun {how}: {script.name} in {size} ranks\n\n{cut_middle(output, LONGEST_OUTPUT)}{why}\n\n"
                f"To run it alone:\n  {again}"
            )
        print(output, end="")
        verdict = left.verdict(script, launch.now() - began)
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    raise_verdict(verdict)
    return output


def _output_of(
    script: Path,
    words: list[str],
    size: int,
    env: Mapping[str, str],
    limit: float,
    directory: Path,
    sanitize: Sanitize,
) -> tuple[str, str]:
    """Run torchrun; return its output, with that of its ranks, and how it ended."""
    launched_by = ("TORCHELASTIC_", "MASTER_", "GROUP_", "ROLE_", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    environ = {name: value for name, value in os.environ.items() if not name.startswith(launched_by)}
    for name in ("RANK", "WORLD_SIZE"):
        environ.pop(name, None)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={size}"]
    wrapper = [str(Path(__file__).with_name("torchrun_rank.py")), str(directory), messages.to_json(sanitize)]
    log = directory / "output"
    with log.open("ab") as output:
        process = subprocess.Popen(
            [*command, *wrapper, str(script), *words],
            env={**environ, **system.for_gloo(), **env},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        how = reaping.describe_exit(process.wait(limit))
    except subprocess.TimeoutExpired:
        _end(process)
        how = f"was ended after {limit:.1f} s, its time limit"
    except BaseException:
        _end(process)
        raise
    return log.read_text(errors="replace"), how


def _end(process: subprocess.Popen[bytes]) -> None:
    """End torchrun, which ends its workers; then what is left of it and of them, which have sessions of their own."""
    workers = system.descendants(process.pid)
    reaping.end(process, after_sigterm=_END_TIMEOUT)
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
        found = {rank: sorted(directory.glob(f"rank{rank}.*.left")) for rank in self._ranks}
        # Of several processes with the number of a rank, it is not known which is the rank.
        self._unknown = [rank for rank in self._ranks if len(found[rank]) != 1]
        self._left: list[RawRecord | None] = [
            unpack(found[rank][0].read_bytes()) if rank not in self._unknown else None for rank in self._ranks
        ]

    def mismatch(self) -> Finding | None:
        records = [raw.record(rank) for rank, raw in enumerate(self._left) if raw is not None]
        return first_mismatch(list(records_of(self._logs.read()).values()) or records)

    def verdict(self, script: Path, seconds: float) -> launch.Verdict:
        """The verdict on ranks that have all passed."""
        if self._unknown:
            say(
                f"{script.name}: the collectives of {list_of(self._unknown)} were not compared with those of others: "
                "Python did not end there by itself"
            )
        reports = [launch.RankReport(rank, launch.RankEnding.PASSED, seconds, launch.now()) for rank in self._ranks]
        reports = add_recorders(self._logs.complete(reports), self._left)
        return judge(reports, False, launch.Case(script.name, file=str(script), note=self._note))

"""Runs of ranks that no test case waits for, and the job of a test."""

import functools
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from torch_testing_ext import launch
from torch_testing_ext._machine import accelerators
from torch_testing_ext._process.logs import text_of
from torch_testing_ext._process.source_files import source_file
from torch_testing_ext._process.terminal import UserTerminal
from torch_testing_ext._testing.bases import ranked_test_case
from torch_testing_ext._testing.bases.rank_verdicts import raise_verdict
from torch_testing_ext._testing.bases.unittest_and_pytest import facts_of
from torch_testing_ext._torch.compiler_state import DYNAMO, INDUCTOR
from torch_testing_ext.launch import environment
from torch_testing_ext.launch.aspects.output import print_leftovers
from torch_testing_ext.launch.aspects.rank_warnings import warn_again_of_ranks
from torch_testing_ext.launch.aspects.sanitizer import sanitize_with

# Keeps these frames out of tracebacks: the message is complete.
__unittest = True


def job_for_test(
    body: Callable[..., object],
    world_size: int,
    directory: Path,
    environ: Mapping[str, str],
    chosen: environment.Settings,
    subject: type | None = None,
    **others: Any,
) -> launch.Job:
    """Make the job of ranks that run `body` in the state of this process, with these variables besides its own.

    `subject` is the class of the test, which the body gets; `others` are further fields of the job.
    """
    terminal = UserTerminal.here()
    job = launch.Job(
        launch.Named.of(body),
        world_size,
        directory,
        launch.ProcessContext.here(environ),
        None if subject is None else launch.Named.of(subject),
        seed=accelerators.SEED,
        stream=chosen.stream,
        debug_rank=chosen.debug_rank,
        terminal=terminal,
        expects_stops=terminal.expects_stops(None if subject is None else source_file(subject)),
    )
    return replace(job, **others)


def run_to_end(
    case: launch.Case,
    world_size: int,
    timeout: float | None,
    start: Callable[[Callable[..., launch.Job]], launch.Run],
    expected: launch.Expected,
    sanitize: Collection[str] = (),
    masks: Mapping[str, str] = MappingProxyType({}),
) -> tuple[str, ...]:
    """Run ranks, raise their verdict unless they pass, and return what each has printed.

    `start(make_job)` starts them with the job that `make_job(body, ...)` makes. `sanitize`: kinds of checks. `masks`:
    variables that hide devices.
    """
    __tracebackhide__ = True
    chosen = environment.read_settings()
    checks = sanitize_with(sanitize)
    directory = launch.new_directory(case.name)
    try:
        with environment.leased_variables(world_size) as addresses:

            def make_job(body: Callable[..., object], **others: Any) -> launch.Job:
                environ = {**addresses, **masks}
                return job_for_test(body, world_size, directory, environ, chosen, sanitize=checks, **others)

            limit = None if chosen.debug_rank is not None else timeout or ranked_test_case.TIMEOUT_DEFAULT
            result = launch.watch(start(make_job), limit, expected)
        warn_again_of_ranks(result.reports)
        verdict = result.verdict(case)
        # A rank that is debugged has the terminal, and no file.
        outputs = tuple(text_of(directory / f"rank{rank}.log") for rank in range(world_size))
        if verdict.outcome is launch.Outcome.PASSED:
            for rank, output in enumerate(outputs):
                for line in output.splitlines():
                    print(f"[rank{rank}] {line}")
            print_leftovers(case.name, result.reports)
    finally:
        launch.discard(directory)
    raise_verdict(verdict)
    return outputs


@functools.cache
def expected_imports(file: str) -> tuple[str, ...]:
    """Return the modules that the ranks of a test file will import by themselves, told by the names in the file.

    Without this, each rank of the first test imports them, which takes seconds, and the fork server once more.
    """
    facts = facts_of(file)
    if not facts.dynamo:
        return ()
    return (DYNAMO, INDUCTOR) if facts.inductor else (DYNAMO,)

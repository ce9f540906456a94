"""The job of a test for its ranks; and whole runs of ranks that no test case waits for."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch_testing_ext import launch
from torch_testing_ext._machine import seeds
from torch_testing_ext._process.logs import text_of
from torch_testing_ext._process.user_terminal import UserTerminal
from torch_testing_ext._process.whole_files import source_file
from torch_testing_ext.launch import settings

from . import passed_warnings, rank_environment, ranked
from .rank_checks import sanitize_with
from .verdicts import print_leftovers, raise_verdict

__unittest = True


def job_for_test(
    body: Callable[..., object],
    world_size: int,
    directory: Path,
    environ: Mapping[str, str],
    chosen: settings.Settings,
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
        seed=seeds.SEED,
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
    sanitize: Iterable[str] = (),
) -> tuple[str, ...]:
    """Run ranks, raise their verdict unless they pass, and return what each has printed.

    `start(make_job)` starts them with the job that `make_job(body, ...)` makes. `sanitize`: kinds of checks.
    """
    __tracebackhide__ = True
    chosen = settings.read()
    checks = sanitize_with(sanitize)
    directory = launch.new_directory(case.name)
    try:
        with rank_environment.leased(world_size) as addresses:

            def make_job(body: Callable[..., object], **others: Any) -> launch.Job:
                return job_for_test(body, world_size, directory, addresses, chosen, sanitize=checks, **others)

            limit = None if chosen.debug_rank is not None else timeout or ranked.TIMEOUT_DEFAULT
            result = launch.watch(start(make_job), limit, expected)
        passed_warnings.warn_again(result.reports)
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

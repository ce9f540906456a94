"""The options of a run as the aspects of its tests read them."""

from __future__ import annotations

from collections.abc import Sequence

from torch_testing_ext._process.declarations import CannotBegin
from torch_testing_ext.launch.aspects import ASPECTS
from torch_testing_ext.launch.launch_settings import check_settings

from . import run_again
from .model import Test
from .options import Action, CannotRun, Options, UsageError


def begin(options: Options) -> None:
    """Prepare this process, before it or another one imports torch. Raises CannotRun, or UsageError."""
    if options.action is Action.DRY_RUN:
        # A schedule needs no devices.
        return
    try:
        for aspect in ASPECTS:
            aspect.begin(options, runs_tests=False)
    except CannotBegin as error:
        raise CannotRun(str(error)) from None
    except ValueError as error:
        raise UsageError(str(error)) from None


def require(options: Options) -> None:
    """Raise UsageError if tests cannot run with these options here."""
    try:
        check_settings()
        for aspect in ASPECTS:
            aspect.require(options)
    except ValueError as error:
        raise UsageError(str(error)) from None


def tests_with(options: Options, tests: Sequence[Test]) -> list[Test]:
    """The tests as they run with these options. Raises UsageError."""
    try:
        for aspect in ASPECTS:
            tests = aspect.tests(options, tests)
    except ValueError as error:
        raise UsageError(str(error)) from None
    return list(tests)


def header(options: Options) -> str:
    """Lines for the header of the run, about all of its tests."""
    return "\n".join(filter(None, (aspect.header(options) for aspect in ASPECTS)))


def facts(options: Options) -> dict[str, str]:
    """Properties of all tests of the run, by name."""
    return {name: fact for aspect in ASPECTS for name, fact in aspect.facts(options).items()}


def remarks(options: Options, tests: Sequence[str]) -> list[str]:
    """Warnings about a run of tests with these names."""
    return [remark for aspect in ASPECTS for remark in aspect.remarks(options, tests)]


def variables(options: Options, repetition: int) -> dict[str, str]:
    """The variables of the processes of tests."""
    command = run_again.command(options)
    environ: dict[str, str] = {}
    for aspect in ASPECTS:
        environ.update(aspect.variables(options, repetition, command))
    return environ


def longest(options: Options) -> float | None:
    """The time in seconds after which a test in ranks is ended from outside, if an aspect decides it."""
    decided = (aspect.longest(options) for aspect in ASPECTS)
    return next((seconds for seconds in decided if seconds is not None), None)

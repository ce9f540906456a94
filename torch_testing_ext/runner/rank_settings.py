"""The settings of processes of tests that follow from the options of a run."""

from __future__ import annotations

import json
from dataclasses import replace

from torch_testing_ext._process import messages, setting_names
from torch_testing_ext._process.terminal import NAME_OF_TEST, TERMINAL_VARIABLE, UserTerminal
from torch_testing_ext.faults import Points, Sweep, Wrong, faults_of_text

from . import run_again
from .model import KnownFile
from .options import Options, OrderHazard, SweepFail, UsageError


def of_ranks(options: Options, repetition: int) -> dict[str, str]:
    """The settings of the ranks of a test."""
    environ = {}
    if options.sanitize is not None:
        environ[setting_names.SANITIZE] = options.sanitize
    if options.sanitize_order is OrderHazard.FAIL:
        environ[setting_names.SANITIZE_ORDER] = "fail"
    seed = options.seed_of_delays(repetition)
    if seed is not None:
        environ[setting_names.SHAKE] = str(seed)
    if options.world is not None:
        environ[setting_names.WORLD] = str(options.world)
    if options.perfetto is not None:
        environ[setting_names.LANES] = "1"
    if options.sweep is not None:
        environ[setting_names.SWEEP] = json.dumps(messages.encode(_sweep(options, options.sweep)))
    return environ


def _sweep(options: Options, faults: str) -> Sweep:
    """These faults at each point of each rank of every test."""
    return Sweep(
        faults_of_text(faults),
        Points(options.sweep_points.value.removesuffix("s")),
        within=options.sweep_within,
        known=options.sweep_known.hangs if isinstance(options.sweep_known, KnownFile) else (),
        wrong=Wrong.HANGS if options.sweep_fail is SweepFail.HANG else Wrong.NOTHING,
    )


def of_debugger(options: Options) -> dict[str, str]:
    """The settings by which processes of tests find the user's terminal, or know why they have none."""
    why_not = f"run it with a debugger: {run_again.command(options)} --pdb {NAME_OF_TEST}"
    terminal = UserTerminal(why_not=why_not)
    if options.pdb:
        terminal = replace(UserTerminal.here(), stop_in=options.debug_rank if options.trace else None)
    return {TERMINAL_VARIABLE: terminal.written(), setting_names.DEBUG_RANK: ""}


def require_terminal(options: Options) -> None:
    """Raise UsageError if a debugger is wanted and has no terminal."""
    if not options.pdb:
        return
    why_not = UserTerminal.here().why_not
    if why_not:
        flag = "--trace" if options.trace else "--pdb"
        raise UsageError(f"{flag} cannot stop: {why_not}")

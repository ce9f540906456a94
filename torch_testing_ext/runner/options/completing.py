"""The consequences of options, and the contradictions between them."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Mapping
from pathlib import Path

from torch_testing_ext.runner.model import KnownFile

from .all_options import OPTION_TABLE, Options
from .dropped_in import with_dropped_in
from .known_hangs import read_known_hangs
from .layers import COMMAND_LINE, DEFAULT
from .names import written_name
from .values import ALL_CPUS, UsageError


def complete(options: Options, sources: Mapping[str, str], cwd: Path) -> Options:
    """The options with what follows from them. Raises UsageError if some contradict each other."""
    if options.shake is not None and options.repeat is not None:
        raise UsageError("--shake repeats tests by itself: leave out --repeat")
    if options.shake is not None and options.shake.seed is None:
        shake = dataclasses.replace(options.shake, seed=random.randrange(2**31))
        options = dataclasses.replace(options, shake=shake)
    _check_needs(options, sources)
    _check_world(options)
    options = _swept(options)
    options = _debugged(options)
    _check_cluster(options)
    if options.cluster is not None and sources["jobs"] == DEFAULT:
        # The cores of this machine say nothing about the nodes.
        options = dataclasses.replace(options, jobs=ALL_CPUS)
    if options.drop_in:
        options = with_dropped_in(options, sources, cwd)
    return options


def _check_needs(options: Options, sources: Mapping[str, str]) -> None:
    """Raises UsageError for options of the command line that mean nothing without another one."""
    for field, spec in OPTION_TABLE.items():
        if spec.needs and sources[field] == COMMAND_LINE and not getattr(options, spec.needs):
            raise UsageError(f"{written_name(field)} needs {written_name(spec.needs)}")


def _check_world(options: Options) -> None:
    """Raises UsageError for options that need ranks which communicate, or devices."""
    if options.world is None:
        return
    for field in _WHY_ALONE:
        default = Options.__dataclass_fields__[field].default
        if getattr(options, field) != default:
            flag = written_name(field)
            raise UsageError(f"--world and {flag} cannot be combined: ranks of a whole world {_WHY_ALONE[field]}")


# Why a whole world leaves no room for another option; and what to do.
_WHY_ALONE = {
    "shake": "wait for nobody, so delays change nothing. Leave out one of them",
    "cluster": "run on this machine. Leave out one of them",
    "fake_accelerators": "use the CPU. Leave out one of them",
    "ranks_per_gpu": "use the CPU. Leave out one of them",
    "sanitize": "are compared anyway. Leave out --sanitize",
    "sweep": "wait for nobody, so a fault hangs none of them. Leave out one of them",
}


def _swept(options: Options) -> Options:
    """The options of a sweep, with what its file of known hangs says. Raises UsageError."""
    if options.sweep is None:
        return options
    for field in ("pdb", "trace"):
        if getattr(options, field):
            flag = written_name(field)
            raise UsageError(f"--sweep and {flag} cannot be combined: a test that stops has no time limit")
    if not isinstance(options.sweep_known, Path):
        return options
    known = KnownFile(options.sweep_known, read_known_hangs(options.sweep_known))
    return dataclasses.replace(options, sweep_known=known)


def _debugged(options: Options) -> Options:
    """The options of a run with a debugger: one test at a time."""
    if not (options.pdb or options.trace):
        return options
    if options.cluster is not None:
        raise UsageError("--cluster and --pdb cannot be combined: tests on a cluster have no terminal")
    return dataclasses.replace(options, pdb=True, jobs=1)


def _check_cluster(options: Options) -> None:
    """Raises UsageError for options that contradict --cluster."""
    if options.cluster is None:
        return
    if options.ranks_per_gpu > 1:
        raise UsageError(
            "--cluster and --ranks-per-gpu cannot be combined: ranks share the devices of one machine only"
        )
    if options.fake_accelerators is not None:
        raise UsageError("--cluster and --fake-accelerators cannot be combined: the nodes have the accelerators")
    if options.gpus is not None:
        raise UsageError("--cluster and --gpus cannot be combined: use -o cluster.gpus-per-node=N")

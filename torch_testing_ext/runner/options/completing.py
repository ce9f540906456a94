"""The consequences of options, and the contradictions between them."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
from collections.abc import Mapping
from pathlib import Path

from torch_testing_ext.launch.aspects import ASPECTS

from .all_options import OPTION_TABLE, Options
from .dropped_in import with_dropped_in
from .layers import COMMAND_LINE, DEFAULT
from .names import written_name
from .values import ALL_CPUS, Loader, UsageError, Warm


def complete(options: Options, sources: Mapping[str, str], cwd: Path) -> Options:
    """The options with what follows from them. Raises UsageError if some contradict each other."""
    _check_needs(options, sources)
    if options.loader is Loader.PYTEST and importlib.util.find_spec("pytest") is None:
        raise UsageError(f"{written_name('loader')}=pytest: pytest is not installed")
    _check_apart(options)
    _check_reports(options)
    _check_cluster(options)
    for aspect in ASPECTS:
        try:
            options = dataclasses.replace(options, **aspect.implied(options))
        except ValueError as error:
            raise UsageError(str(error)) from None
    if options.cluster is not None and sources["jobs"] == DEFAULT:
        # The cores of this machine say nothing about the nodes.
        options = dataclasses.replace(options, jobs=ALL_CPUS)
    if options.coverage:
        # A warm server was started before, so it measures nothing.
        options = dataclasses.replace(options, warm=Warm.NEVER)
    if options.drop_in:
        options = with_dropped_in(options, sources, cwd)
    return options


def _check_needs(options: Options, sources: Mapping[str, str]) -> None:
    """Raises UsageError for options of the command line that mean nothing without another one."""
    for field, spec in OPTION_TABLE.items():
        if spec.needs and sources[field] == COMMAND_LINE and not getattr(options, spec.needs):
            raise UsageError(f"{written_name(field)} needs {written_name(spec.needs)}")


def _check_apart(options: Options) -> None:
    """Raises UsageError for options that cannot be combined."""
    for field, spec in OPTION_TABLE.items():
        for other, why in spec.apart.items() if _is_given(options, field) else ():
            if _is_given(options, other):
                raise UsageError(f"{written_name(field)} and {written_name(other)} cannot be combined: {why}")


def _check_reports(options: Options) -> None:
    """Raises UsageError if one report would take the place of another."""
    fields: dict[Path, str] = {}
    for field in OPTION_TABLE:
        file = getattr(options, field)
        # One may send several to the same device or pipe.
        if not isinstance(file, Path) or (file.exists() and not file.is_file()):
            continue
        other = fields.setdefault(Path(os.path.normpath(file.absolute())), field)
        if other != field:
            raise UsageError(f"{written_name(other)} and {written_name(field)} name one file: {file}")


def _is_given(options: Options, field: str) -> bool:
    default = Options.__dataclass_fields__[field].default
    return bool(getattr(options, field) != default)


def _check_cluster(options: Options) -> None:
    """Raises UsageError for options that contradict --cluster."""
    if options.cluster is None:
        return
    if options.ranks_per_gpu > 1:
        raise UsageError(
            "--cluster and --ranks-per-gpu cannot be combined: ranks share the devices of one machine only"
        )
    if options.gpus is not None:
        raise UsageError("--cluster and --gpus cannot be combined: use -o cluster.gpus-per-node=N")

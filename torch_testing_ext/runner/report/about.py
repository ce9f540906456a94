"""Facts that a report of a bug needs: versions, system, variables, replacements in torch, the run, its failure."""

from __future__ import annotations

import platform
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from torch_testing_ext._process import system
from torch_testing_ext.runner.events import RunBegan
from torch_testing_ext.runner.options.command_line import version_line

from . import show, wording
from .journal import JournalError
from .journal_reader import find_journal, read_journal

# What changes how ranks start, communicate and use devices, by the beginning of the variable.
_OF_RANKS = ("TORCH", "PYTORCH", "DISTRIBUTED_TESTS_", "NCCL_", "GLOO_", "CUDA_", "HIP_", "ROCR_", "OMP_")
# The process that the user starts does not import torch.
_OF_TORCH = "from torch_testing_ext._torch import replacing; print(*replacing.lines_of_table(), sep='\\n')"


def lines_about(environ: Mapping[str, str], place: Path) -> Iterator[str]:
    """The facts about this installation, and about the latest run that a folder or journal knows, with a failure."""
    yield f"versions: {version_line()}"
    yield f"system: {platform.platform()}, {system.cores()} cores"
    settings = [f"{name}={value}" for name, value in sorted(environ.items()) if name.startswith(_OF_RANKS)]
    yield f"variables: {' '.join(settings) or 'none'}"
    yield from _lines_of_header(place)
    yield "replaced in torch while ranks need it:"
    yield from (f"  {line}" for line in _lines_of_torch())
    for run in show.known_runs([place])[:1]:
        failures = [*show.accounts_of_failures([run], (), place, place)]
        yield f"failures in the latest run: {len(failures)}"
        yield from (f"\n{failure}" for failure in failures[:1])


def _lines_of_header(place: Path) -> Iterator[str]:
    try:
        run = read_journal(find_journal(place))
    except JournalError:
        return
    for event in run.events:
        if isinstance(event, RunBegan):
            yield from (f"{name} of the latest run: {value}" for name, value in wording.header_facts(event.header))


def _lines_of_torch() -> list[str]:
    asked = subprocess.run([sys.executable, "-c", _OF_TORCH], capture_output=True, encoding="utf-8", check=False)
    if asked.returncode:
        return ["not known: torch cannot be imported", *asked.stderr.splitlines()[-1:]]
    return asked.stdout.splitlines()

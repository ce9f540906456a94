"""The lines that the processes of a run execute, measured by coverage.py."""

from __future__ import annotations

import os
import sys
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torch_testing_ext._process.words import count

from .options import CannotRun, UsageError
from .options.all_options import ALL_SOURCES

# The ways of coverage.py into processes that are started or forked, and that end without Python's clean-up.
_PATCHES = ["subprocess", "fork", "_exit"]

_NOT_OTHERS = (
    "warning: --coverage measured no process of a test: this Python does not execute coverage.py's a1_coverage.pth, "
    "which is next to it in site-packages"
)
_NO_FILE = "no file was measured: coverage.py's setting source names the folders, such as source = ['src']"


@contextmanager
def measured(source: str) -> Iterator[None]:
    """Measure a package or folder, or all, during this block, and write the report of it.

    The project's settings of coverage.py hold.
    """
    try:
        import coverage
    except ImportError:
        raise UsageError("--coverage needs coverage.py: pip install coverage") from None
    if coverage.version_info < (7, 10):
        raise UsageError(f"--coverage needs coverage.py 7.10 or newer, and this is {coverage.__version__}")
    sources = None if source == ALL_SOURCES else [source]
    with tempfile.TemporaryDirectory(prefix="torch_testing_ext.") as folder:
        of_project = coverage.Coverage().config.config_file
        if of_project is None:
            # It measures other processes only if it has read settings from a file.
            of_project = os.path.join(folder, ".coveragerc")
            Path(of_project).touch()
        # Away from data of other runs.
        data = Path(folder, "data")
        data.mkdir()
        measuring = coverage.Coverage(str(data / ".coverage"), config_file=of_project, data_suffix=True, source=sources)
        measuring.set_option("run:patch", _PATCHES)
        # The file of each process has a name of its own.
        measuring.set_option("run:parallel", True)
        # This process runs nothing of the project.
        quiet = [*measuring.config.disable_warnings, "no-data-collected", "module-not-imported"]
        measuring.set_option("run:disable_warnings", quiet)
        measuring.start()
        try:
            yield
        finally:
            measuring.stop()
            measuring.save()
        together = coverage.Coverage(config_file=of_project, source=sources)
        if len(_files(data)) < 2:
            print(_NOT_OTHERS, file=sys.stderr)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", coverage.exceptions.CoverageWarning)
                together.combine(_files(data))
            together.save()
            percent = together.html_report(ignore_errors=True)
        except coverage.exceptions.NoDataError:
            raise CannotRun(f"--coverage: {_NO_FILE}") from None
        cut = len(_files(data))
        if cut:
            left_out = f"left out {count(cut, 'data file')} of killed processes, which had not finished writing"
            print(f"coverage: {left_out}", file=sys.stderr)
        print(f"coverage: {percent:.0f} % of the lines, in {together.get_option('html:directory')}/index.html")


def _files(data: Path) -> list[str]:
    """The files of processes that are not combined yet."""
    return sorted(str(file) for file in data.iterdir() if not file.name.endswith("-journal"))

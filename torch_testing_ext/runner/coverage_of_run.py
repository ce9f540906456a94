"""The lines that the processes of a run execute, measured by coverage.py."""

from __future__ import annotations

import glob
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from .options import CannotRun, UsageError

# The ways of coverage.py into processes that are started or forked, and that end without Python's clean-up.
_PATCHES = ["subprocess", "fork", "_exit"]

_NOT_OTHERS = (
    "warning: --coverage measured no process of a test: this Python does not execute coverage.py's a1_coverage.pth, "
    "which is next to it in site-packages"
)
_NO_FILE = "no file was measured: coverage.py's setting source names the folders, such as source = ['src']"


@contextmanager
def measured() -> Iterator[None]:
    """Measure this block, and write the report of it. The project's settings of coverage.py hold."""
    try:
        import coverage
    except ImportError:
        raise UsageError("--coverage needs coverage.py: pip install coverage") from None
    if coverage.version_info < (7, 10):
        raise UsageError(f"--coverage needs coverage.py 7.10 or newer, and this is {coverage.__version__}")
    with tempfile.TemporaryDirectory(prefix="torch_testing_ext.") as folder:
        of_project = coverage.Coverage().config.config_file
        if of_project is None:
            # It measures other processes only if it has read settings from a file.
            of_project = os.path.join(folder, ".coveragerc")
            Path(of_project).touch()
        measuring = coverage.Coverage(config_file=of_project, data_suffix=True)
        measuring.set_option("run:patch", _PATCHES)
        # The file of each process has a name of its own.
        measuring.set_option("run:parallel", True)
        # This process runs nothing of the project.
        quiet = [*measuring.config.disable_warnings, "no-data-collected"]
        measuring.set_option("run:disable_warnings", quiet)
        measuring.start()
        try:
            yield
        finally:
            measuring.stop()
            measuring.save()
        together = coverage.Coverage(config_file=of_project)
        if len(glob.glob(f"{glob.escape(str(together.get_option('run:data_file')))}.*")) < 2:
            print(_NOT_OTHERS, file=sys.stderr)
        try:
            together.combine()
            together.save()
            percent = together.html_report(ignore_errors=True)
        except coverage.exceptions.NoDataError:
            raise CannotRun(f"--coverage: {_NO_FILE}") from None
        print(f"coverage: {percent:.0f} % of the lines, in {together.get_option('html:directory')}/index.html")

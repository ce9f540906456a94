"""The command `show`."""

from pathlib import Path

from torch_testing_ext._tests.kept_failures import CACHE

from .model import ExitCode
from .options import UsageError, layers
from .options.sources import ConfiguredOptions


def show_runs(configured: ConfiguredOptions, root: Path) -> int:
    """Prints the accounts of failures of the latest run, or of the tests that the user names."""
    from torch_testing_ext.runner.report import show

    options = configured.options
    places = [(options.journal or options.cache).resolve()]
    if layers.COMMAND_LINE not in (configured.sources["journal"], configured.sources["cache"]):
        places = list(dict.fromkeys([*places, Path(CACHE).resolve()]))
    runs = show.known_runs(places)
    if not runs:
        raise UsageError(f"show: no run is known yet (results: {places[0]})")
    found = list(show.accounts_of_failures(runs, options.names, root, Path.cwd(), as_data=options.json))
    if not found:
        raise UsageError(f"show: no test failed in the latest run ({runs[0].title})")
    print("\n".join(found))
    return ExitCode.PASSED

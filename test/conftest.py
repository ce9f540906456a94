"""Starts from a known state, marks slow rows, and ends by how many tests passed, failed and were skipped."""

import os
import signal
import sys
from unittest import mock

import pytest
from cpu_limit import pytest_addoption as pytest_addoption, start_measuring
from slow_rows import marks_of_row
from temporary_folder import use_own_folder

# One thread of torch for each rank, as under torchrun: on two cores, those of several ranks wait for each other, which
# took a third of the time of tests that compute. torch reads this when it is imported, here, by xdist and in programs.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Tests start thousands of interpreters: without this, each would compile our modules again, 0.2 s for each command.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# As in an environment that is active: printed commands then begin with `python`, by whatever path this was started.
os.environ["PATH"] = os.pathsep.join([os.path.dirname(sys.executable), os.environ.get("PATH", os.defpath)])


def pytest_configure(config):
    # Where .ci/run keeps the durations. Not an option for pytest: runs that tests start would write the same file.
    if "CI_JUNIT" in os.environ:
        config.option.xmlpath = os.environ.pop("CI_JUNIT")
    os.environ.pop("COLUMNS", None)  # from pytest-xdist: what tests start would take it for the width of a terminal
    # Whoever starts pytest in the background may ignore these, and what tests start would inherit that.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    for ignored in (signal.SIGHUP, signal.SIGQUIT):
        if signal.getsignal(ignored) is signal.SIG_IGN:
            signal.signal(ignored, signal.SIG_DFL)
    start_measuring(config)
    use_own_folder(config)
    config.pluginmanager.register(GroupsOfOtherFiles())


def pytest_itemcollected(item):
    for mark in marks_of_row(item.nodeid):
        item.add_marker(mark)
    # `-m 'not slow'` then leaves both out.
    if item.get_closest_marker("nightly"):
        item.add_marker("slow")


def pytest_collection_finish():
    """Import what nearly every test needs, so that the first one does not pay for it."""
    import torch.distributed  # noqa: F401

    from torch_testing_ext import launch  # noqa: F401


class GroupsOfOtherFiles:
    """Each file is written as a program of its own: groups of other files do not change how its ranks are started.

    No fixture of the module: torchtest would run the tests that share it one after the other.
    """

    def __init__(self):
        self._file = None
        self._patch = None

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item, nextitem):
        if item.path != self._file:
            self._file = item.path
            self._begin()
        try:
            return (yield)
        finally:
            if nextitem is None or nextitem.path != self._file:
                self._file = None
                if self._patch is not None:
                    self._patch.stop()
                    self._patch = None

    def _begin(self):
        import torch.distributed  # noqa: F401

        from torch_testing_ext import launch
        from torch_testing_ext._torch.groups import process_groups

        if process_groups.made_groups_before():
            launch.close()  # a fork server that was started for other files, perhaps in a new interpreter
            self._patch = mock.patch.object(process_groups, "made_groups_before", lambda: False)
            self._patch.start()


def pytest_unconfigure(config):
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    if reporter is None or hasattr(config, "workerinput"):
        return

    def count(*outcomes):
        return sum(len(reporter.stats.get(outcome, ())) for outcome in outcomes)

    passed, failed = count("passed", "xfailed"), count("failed", "error", "xpassed")
    print(f"{passed} passed, {failed} failed, {count('skipped')} skipped")

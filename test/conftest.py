"""Starts from a known state, and prints the counts of passed, failed and skipped tests as the last line of a run."""

import os
import signal


def pytest_configure():
    os.environ.pop("COLUMNS", None)  # from pytest-xdist: what tests start would take it for the width of a terminal
    # Whoever starts pytest in the background may ignore these, and what tests start would inherit that.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)


def pytest_unconfigure(config):
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    if reporter is None or hasattr(config, "workerinput"):
        return

    def count(*outcomes):
        return sum(len(reporter.stats.get(outcome, ())) for outcome in outcomes)

    passed, failed = count("passed", "xfailed"), count("failed", "error", "xpassed")
    print(f"{passed} passed, {failed} failed, {count('skipped')} skipped")

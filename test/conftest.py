"""Prints the counts of passed, failed and skipped tests as the last line of a pytest run."""


def pytest_unconfigure(config):
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    if reporter is None or hasattr(config, "workerinput"):
        return

    def count(*outcomes):
        return sum(len(reporter.stats.get(outcome, ())) for outcome in outcomes)

    passed, failed = count("passed", "xfailed"), count("failed", "error", "xpassed")
    print(f"{passed} passed, {failed} failed, {count('skipped')} skipped")

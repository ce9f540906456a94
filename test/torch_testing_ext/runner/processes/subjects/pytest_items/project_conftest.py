import os

import pytest


def pytest_configure(config):
    config.addinivalue_line("markers", "slow: takes long")


@pytest.fixture(scope="session")
def server():
    yield os.getpid()


def pytest_collection_modifyitems(config, items):
    config.hook.pytest_deselected(items=[item for item in items if "deselected" in item.name])
    items[:] = [item for item in items if "deselected" not in item.name]


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item, nextitem):
    if "swallowed" in item.name:
        return True
    if "plugin_crashes" in item.name:
        raise LookupError("in a hook of the project")


def pytest_runtest_logreport(report):
    if "stops_the_session" in report.nodeid and report.when == "call":
        SESSIONS[0].shouldstop = "it has seen enough"
    if "fails_the_session" in report.nodeid and report.when == "call":
        SESSIONS[0].shouldfail = "it is bad enough"
    if "counts_a_failure" in report.nodeid and report.when == "call":
        SESSIONS[0].testsfailed += 1


SESSIONS = []


def pytest_collection_finish(session):
    SESSIONS[:] = [session]

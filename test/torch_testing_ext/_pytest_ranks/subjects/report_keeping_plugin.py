import json
import os

import pytest

from torch_testing_ext._pytest_ranks.reports import TestReports

found, here, sent = {}, None, None


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_logstart():
    global here, sent
    here, sent = TestReports(), TestReports()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport(item, call):
    report = yield
    here.made(report, call.excinfo.value if call.excinfo is not None else None)
    return report


config = None


def pytest_configure(config):
    globals()["config"] = config


def pytest_runtest_logreport(report):
    here.add(report)
    data = json.loads(json.dumps(config.hook.pytest_report_to_serializable(config=config, report=report)))
    sent.add(config.hook.pytest_report_from_serializable(config=config, data=data))


def pytest_runtest_logfinish(nodeid):
    found[nodeid.partition("::")[2]] = [
        [
            [
                f"{each.outcome.value}{' against xfail' if each.passed_against_xfail else ''}",
                each.reason or each.title,
                each.phase,
                each.need,
                each.is_of_ranks,
            ]
            for each in one.judge()
        ]
        for one in (here, sent)
    ]


def pytest_unconfigure():
    with open(os.environ["FOUND"], "w") as file:
        json.dump(found, file)

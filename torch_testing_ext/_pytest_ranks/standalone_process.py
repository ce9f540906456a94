"""The interpreter of one standalone test: a session of pytest that runs it and writes down what it reports."""

from __future__ import annotations

import json
import os
import pickle
import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from torch_testing_ext._process import system

PROCESS = "torch_testing_ext._pytest_ranks.standalone_process"
# The option by which our plugin knows that this is the interpreter of the test.
IS_STANDALONE = "dist_is_standalone"
# Options of the parent's session that select tests, report or stop, or start other processes.
_OFF = ("collectonly", "lf", "failedfirst", "newfirst", "stepwise", "stepwise_skip", "distload", "looponfail")
_NONE = ("deselect", "xmlpath", "numprocesses", "maxprocesses", "reruns", "pastebin")
_NOT_FOR_ONE_TEST: dict[str, Any] = {
    **dict.fromkeys((*_OFF, "usepdb", "trace"), False),
    **dict.fromkeys(_NONE),
    "keyword": "",
    "markexpr": "",
    "maxfail": 0,
    "dist": "no",
    "tx": [],
    "cov_source": [],
    "file_or_dir": [],
}
_PLUGINS = ["no:terminal", "no:cacheprovider", "no:rerunfailures"]


@dataclass
class Order:
    """What to run, and with which options of the parent's session."""

    node: str
    options: dict[str, Any]
    search_path: list[str]
    parent: int


class StandaloneReporter:
    """A plugin that writes each report, warning and refusal as a line of JSON."""

    def __init__(self, file: Any):
        self._file = file
        self._config: Any = None

    def _write(self, **values: Any) -> None:
        self._file.write(json.dumps(values, default=str) + "\n")
        self._file.flush()

    def pytest_configure(self, config: pytest.Config) -> None:
        self._config = config

    def pytest_runtest_logreport(self, report: Any) -> None:
        data = self._config.hook.pytest_report_to_serializable(config=self._config, report=report)
        self._write(kind="report", report=data)

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            self._write(kind="refusal", text=report.longreprtext)

    def pytest_warning_recorded(self, warning_message: Any) -> None:
        self._write(
            kind="warning",
            text=str(warning_message.message),
            category=warning_message.category.__name__,
            file=warning_message.filename,
            line=warning_message.lineno,
        )

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        if len(session.items) != 1:
            names = ", ".join(item.nodeid for item in session.items) or "none"
            self._write(kind="refusal", text=f"the new interpreter has collected not this one test, but: {names}")
            session.items.clear()


def main(directory: Path) -> int:
    """Run the test as ordered; return pytest's exit code."""
    order = pickle.loads(Path(directory, "order").read_bytes())
    system.die_with(order.parent, by=signal.SIGKILL)
    if "COVERAGE_PROCESS_CONFIG" in os.environ:
        import coverage

        coverage.process_startup()  # unless a .pth file has done so
    sys.path[:] = order.search_path
    with open(directory / "reports", "w") as file:
        options = {**order.options, **_NOT_FOR_ONE_TEST, IS_STANDALONE: True}
        options.pop("file_or_dir", None)
        config: Any = pytest.Config.fromdictargs(
            options, [*(word for name in _PLUGINS for word in ("-p", name)), order.node]
        )
        config.pluginmanager.register(StandaloneReporter(file), "torch_testing_ext standalone reporter")
        return int(config.hook.pytest_cmdline_main(config=config))


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))

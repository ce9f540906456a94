"""The interpreter of one standalone test: a session of pytest that runs it and writes down what it reports."""

from __future__ import annotations

import json
import os
import pickle
import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import pytest

from torch_testing_ext._process import messages, system
from torch_testing_ext._tests import notes
from torch_testing_ext.launch import OwnWarning, accounts

from .pytest_internals import collected_files

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


@dataclass(frozen=True)
class StandaloneTest:
    """The test to run, for its interpreter."""

    node: str
    # The path of its file.
    path: str
    # The options of the parent's session, pickled: those of plugins may have any type.
    options: bytes
    search_path: tuple[str, ...]
    parent: int


@dataclass(frozen=True)
class FromStandalone:
    """One thing that the interpreter says."""

    # As pytest serialises it, in JSON.
    report: str = ""
    # One that pytest has recorded.
    warning: OwnWarning | None = None
    # Why the test was not run.
    refusal: str = ""
    # Processes that ranks of the test left running.
    left_running: tuple[str, ...] = ()


class StandaloneReporter:
    """A plugin that writes a message for each report, warning and refusal."""

    def __init__(self, file: TextIO):
        self._file = file
        self._config: Any = None

    def _write(self, message: FromStandalone) -> None:
        self._file.write(messages.to_json(message) + "\n")
        self._file.flush()

    def pytest_configure(self, config: pytest.Config) -> None:
        self._config = config

    def pytest_runtest_logreport(self, report: Any) -> None:
        data = self._config.hook.pytest_report_to_serializable(config=self._config, report=report)
        self._write(FromStandalone(report=json.dumps(data, default=str)))

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            self._write(FromStandalone(refusal=report.longreprtext))

    def pytest_sessionfinish(self) -> None:
        self._write(FromStandalone(left_running=notes.take_left_running()))

    def pytest_warning_recorded(self, warning_message: Any) -> None:
        self._write(FromStandalone(warning=accounts.pack_warning(warning_message)))

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        if len(session.items) != 1:
            names = ", ".join(item.nodeid for item in session.items) or "none"
            self._write(FromStandalone(refusal=f"the new interpreter has collected not this one test, but: {names}"))
            session.items.clear()


def main(directory: Path) -> int:
    """Run the test that the parent has named; return pytest's exit code."""
    test = messages.from_json(Path(directory, "test").read_bytes(), messages.by_name(StandaloneTest))
    system.die_with(test.parent, by=signal.SIGKILL)
    if "COVERAGE_PROCESS_CONFIG" in os.environ:
        import coverage

        # Unless a .pth file has done so.
        coverage.process_startup()
    sys.path[:] = test.search_path
    with open(directory / "messages", "w", encoding="utf-8") as file:
        options = {**pickle.loads(test.options), **_NOT_FOR_ONE_TEST, IS_STANDALONE: True}
        options.pop("file_or_dir", None)
        words = [f"-p{name}" for name in _PLUGINS]
        config: Any = pytest.Config.fromdictargs(options, [*words, test.node])
        config.pluginmanager.register(StandaloneReporter(file), "torch_testing_ext standalone reporter")
        with collected_files.whole_paths():
            return int(config.hook.pytest_cmdline_main(config=config))


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))

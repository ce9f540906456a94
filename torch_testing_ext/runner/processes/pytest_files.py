"""The files that pytest collects in a project, found without an import of any."""

from __future__ import annotations

import os
import warnings
from collections.abc import Generator
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

import pytest

from torch_testing_ext._process import file_reads, fork_safety, sessions
from torch_testing_ext._process.channels import Channel
from torch_testing_ext._pytest_ranks.pytest_internals import collected_files, configuration
from torch_testing_ext.runner.load_as import FilesFound, LoadAs

from .errors_of_pytest import explain_error
from .fork_parent_messages import FindFiles, Nothing
from .pytest_collection import Adapter, make_config, own_streams, plugins_of_project


def run_and_exit(request: FindFiles, channel: Channel[Nothing]) -> NoReturn:
    """Be the process that asks pytest for its files."""
    os.chdir(request.root)
    log = os.open(request.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    sessions.detach(log)
    fork_safety.of_process.mark_fork_safe()
    file_reads.begin(request.reads, inherited=True)
    channel.send(find_files(request.load_as))
    os._exit(0)


def find_files(load_as: LoadAs) -> FilesFound:
    """The files that pytest collects in the working directory."""
    finder = _Finder(load_as)
    with warnings.catch_warnings(), collected_files.whole_paths():
        config = None
        try:
            config = make_config(load_as, finder)
            config.args[:] = [place.partition("::")[0] if not Path(place).exists() else place for place in config.args]
            session = pytest.Session.from_config(config)
            _start(session)
            session.perform_collect()
        except _AllFound:
            pass
        except BaseException as error:
            return FilesFound((), failure=explain_error(error))
        finally:
            if config is not None:
                with suppress(Exception):
                    configuration.unconfigure(config)
    return FilesFound(tuple(dict.fromkeys(finder.paths)), tuple(finder.failures.items()))


def _start(session: pytest.Session) -> None:
    """Let installed plugins begin a session, without which some fail at collectors."""
    manager = session.config.pluginmanager
    start = manager.subset_hook_caller("pytest_sessionstart", plugins_of_project(session.config))
    start(session=session)


class _AllFound(BaseException):
    """pytest has been everywhere. Hooks that change what is collected would see nothing."""


class _Finder(Adapter):
    """The plugin that notes files in place of their collection."""

    def __init__(self, load_as: LoadAs) -> None:
        super().__init__(load_as)
        self.paths: list[str] = []
        self.failures: dict[str, str] = {}

    def pytest_collectstart(self, collector: Any) -> None:
        if collected_files.is_file(collector):
            self.paths.append(str(collector.path).removeprefix(f"{os.getcwd()}{os.sep}"))
            collector.collect = list

    @pytest.hookimpl(wrapper=True)
    def pytest_make_collect_report(self, collector: Any) -> Generator[None, Any, Any]:
        with own_streams():
            report = yield
        if report.outcome == "failed":
            self.failures[report.nodeid] = explain_error(report.call.excinfo.value)
        return report

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self) -> None:
        raise _AllFound

"""A session of pytest that collects one test file.

pytest.main would run tests right after it has collected them; here, the steps that it takes are taken one by one, with
the same hooks in the same order. The session begins where one for the whole project does, and ignores all else on the
way to the file: so configuration, conftest files, ids and packages are those of the whole project.

Each worker ends the session that it has inherited. If the project has hooks that begin or end a session, such as
one that removes a folder at its end, a worker has a session of its own, from the beginning.
"""

from __future__ import annotations

import io
import sys
import threading
import unittest
import warnings
from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from torch_testing_ext._process.running_coverage import current_coverage
from torch_testing_ext._process.words import nearest
from torch_testing_ext._pytest_ranks.pytest_internals import captured_output, collected_files, configuration
from torch_testing_ext.runner.load_as import LoadAs

from .errors_of_pytest import explain_error

PLUGIN = "torch_testing_ext.pytest_plugin"
_ARGUMENTS = (
    # Named here, the plugin is loaded where the package is not installed, too.
    *("-p", PLUGIN),
    # The output of a worker is its log.
    "--capture=no",
    # What the preloaded server has imported: torch_testing_ext, for example, which contains a plugin of pytest.
    *("-W", "ignore::pytest.PytestAssertRewriteWarning"),
)
# Options of a project that would select tests by what pytest itself remembers, write files that all workers share,
# leave the tests to other processes, or change and judge snapshots by the tests of one worker (syrupy's).
_OVERRULED: dict[str, Any] = {
    "basetemp": None,
    "collectonly": False,
    "dist": "no",
    "failedfirst": False,
    "htmlpath": None,
    "json_report": False,
    "lf": False,
    "maxfail": 0,
    "newfirst": False,
    "numprocesses": None,
    "stepwise": False,
    "tx": [],
    "update_snapshots": False,
    "warn_unused_snapshots": True,
    "xmlpath": None,
}
# The name of pytest-cov's plugin.
_COVERAGE = "_cov"
_SESSION_HOOKS = ("pytest_sessionstart", "pytest_sessionfinish", "pytest_unconfigure")


class Collection:
    """The tests that pytest has collected in one file, and the session for them."""

    def __init__(self, path: str, load_as: LoadAs):
        self.path = path
        # pytest has come to the file.
        self.is_reached = False
        # The module as pytest has imported it.
        self.module: ModuleType | None = None
        self.import_error: BaseException | None = None
        # What could not be collected, and why: the names of classes or functions, none for the whole file.
        self.failures: list[tuple[tuple[str, ...], str]] = []
        # Items of pytest.
        self.deselected: list[Any] = []
        # The names of classes or functions that a hook makes no items of.
        self.dropped: list[tuple[str, ...]] = []
        # Its session has ended: a worker needs another one.
        self.is_for_listing = False
        self._load_as = load_as
        self._session: Any = None
        self._failed_before = 0
        self._hooks: tuple[Any, Any] = sys.unraisablehook, threading.excepthook

    @classmethod
    def of(cls, path: str, load_as: LoadAs) -> Collection:
        """Collect a file, in the process from which the workers are forked."""
        collection = cls(path, load_as)
        collection._collect(for_listing=True)
        return collection

    def again(self) -> Collection:
        """Collect it by a new session, in a process that has imported the file and runs tests."""
        collection = Collection(self.path, self._load_as)
        collection._collect(for_listing=False)
        return collection

    def _collect(self, for_listing: bool) -> None:
        with self._own_hooks(), warnings.catch_warnings(), collected_files.whole_paths():
            try:
                self._begin()
                if for_listing and self._project_has(*_SESSION_HOOKS):
                    self.is_for_listing = True
                    self.finish()
            except BaseException as error:
                # What it has collected so far is not all, or not right.
                self._session = None
                if self.import_error is None:
                    self.failures.append(((), explain_error(error)))
        if not self.is_reached and not self.failures:
            self.failures.append(((), "it does not collect the file on its own, although it does with the others"))

    def _begin(self) -> None:
        config = make_config(self._load_as, _Observer(self, self._load_as))
        config.args[:] = [place for place in config.args if _leads_to(place, Path(self.path))] or [self.path]
        session = pytest.Session.from_config(config)
        session.exitstatus = pytest.ExitCode.OK
        self._session = session
        config.hook.pytest_sessionstart(session=session)
        config.hook.pytest_collection(session=session)

    @property
    def items(self) -> list[Any]:
        return list(self._session.items) if self._session is not None else []

    @property
    def config(self) -> Any:
        return self._session.config

    def _project_has(self, *hooks: str) -> bool:
        """Whether the project itself has one of these hooks."""
        return any(hasattr(plugin, hook) for plugin in plugins_of_project(self.config) for hook in hooks)

    def run(self, items: list[Any], loop: Any) -> None:
        """Have pytest run `loop`, in place of its own loop over all tests."""
        sys.unraisablehook, threading.excepthook = self._hooks
        self._failed_before = self._session.testsfailed
        self._session.items = items
        self._session.testscollected = len(items)
        self.config.pluginmanager.register(loop)
        self.config.hook.pytest_runtestloop(session=self._session)

    @property
    def wants_to_stop(self) -> str:
        """The reason, if a test or a plugin has asked that no more tests run."""
        return str(self._session.shouldstop or self._session.shouldfail or "")

    @property
    def failures_counted(self) -> int:
        """The number of failures since the tests began: a plugin may count one without a report."""
        return int(self._session.testsfailed) - self._failed_before

    @property
    def is_test_file(self) -> bool:
        """Whether the file should have tests, by its name or since you name it: others are for doctests."""
        path = Path(self.path)
        if self._session is None or path in (Path.cwd() / place for place in self._load_as.places):
            return True
        return any(path.match(pattern) for pattern in self.config.getini("python_files"))

    def warnings_of_settings(self) -> tuple[str, ...]:
        """A warning about each setting of the project that pytest does not know."""
        if self._session is None:
            return ()
        unknown, known = configuration.settings(self.config)
        return tuple(f"pytest has no setting {name}.{nearest(name, known, only_near=True)}" for name in unknown)

    def finish(self, status: int = 0) -> int:
        """End the session. Returns the exit status, which the project's hooks may have changed.

        Installed plugins judge a whole session, and this one has few of its tests.
        """
        self._session.exitstatus = status
        judges = self._project_has("pytest_sessionfinish")
        self.config.hook.pytest_sessionfinish(session=self._session, exitstatus=status)
        configuration.unconfigure(self.config)
        return int(self._session.exitstatus) if judges else status

    # -- hooks of the interpreter, which pytest replaces: they are not for tests that unittest runs

    @contextmanager
    def _own_hooks(self) -> Iterator[None]:
        before = sys.unraisablehook, threading.excepthook
        try:
            yield
        finally:
            self._hooks = sys.unraisablehook, threading.excepthook
            sys.unraisablehook, threading.excepthook = before


def plugins_of_project(config: Any) -> list[Any]:
    """The plugins that are neither pytest's, nor ours, nor installed, such as conftest files."""
    installed = installed_packages(config)
    return [plugin for plugin in config.pluginmanager.get_plugins() if _package(plugin) not in installed]


def installed_packages(config: Any) -> frozenset[str]:
    """The packages of pytest, of installed plugins, and this one."""
    of_plugins = (_package(plugin) for plugin, _ in config.pluginmanager.list_plugin_distinfo())
    return frozenset({"_pytest", __name__.partition(".")[0], *of_plugins})


def make_config(load_as: LoadAs, observer: Any) -> Any:
    """The configuration of a session in the working directory, whose arguments are the places where it looks."""
    # Plugins would warn once for each file. pytest sets a filter of its own here, and those of the project afterwards.
    with warnings.catch_warnings(record=not sys.warnoptions):
        config = configuration.make_config([*load_as.places, *_ARGUMENTS], [observer])
    config.args += [place for place in load_as.more_places if place not in config.args]
    _silence(config)
    return config


def _leads_to(place: str, file: Path) -> bool:
    """Whether pytest may find a file in a place, which may be a file, a folder, or something else that pytest knows."""
    path = Path.cwd() / place.partition("::")[0]
    if path.is_dir():
        return path in file.parents
    return path == file or not path.exists()


def _silence(config: Any) -> None:
    """Take out the plugins that report on a whole session, or remember which tests have failed."""
    manager = config.pluginmanager
    coverage_plugin = manager.get_plugin(_COVERAGE)
    if coverage_plugin is not None:
        # Each unit alone would be below its limit.
        manager.unregister(coverage_plugin)
        coverage = current_coverage()
        if coverage is not None:
            coverage.stop()
    for name in configuration.REMEMBERING:
        plugin = manager.get_plugin(name)
        if plugin is not None:
            manager.unregister(plugin)
    reporter = captured_output.redirect_terminal(config, io.StringIO())
    if reporter is not None:
        manager.unregister(reporter)
        manager.register(_SilentReporter(reporter), configuration.TERMINAL)


class _SilentReporter:
    """Has everything that other plugins want of the reporter on the terminal, but none of its hooks."""

    def __init__(self, reporter: Any):
        self._reporter = reporter

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reporter, name)


class Adapter:
    """The plugin that adapts pytest's options to a session whose tests run elsewhere."""

    def __init__(self, load_as: LoadAs):
        self._load_as = load_as

    @pytest.hookimpl(tryfirst=True)
    def pytest_configure(self, config: Any) -> None:
        for name, value in _OVERRULED.items():
            if hasattr(config.option, name):
                setattr(config.option, name, value)
        if self._load_as.all_marks:
            config.option.markexpr = ""

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_load_initial_conftests(self) -> Generator[None, Any, Any]:
        with own_streams():
            return (yield)


class _Observer(Adapter):
    """The plugin that leads to one file, and notes what is and what is not collected."""

    def __init__(self, collection: Collection, load_as: LoadAs):
        super().__init__(load_as)
        self._collection = collection

    @pytest.hookimpl(tryfirst=True)
    def pytest_ignore_collect(self, collection_path: Path) -> bool | None:
        return None if collected_files.leads_to(collection_path, Path(self._collection.path)) else True

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_make_collect_report(self, collector: Any) -> Generator[None, Any, Any]:
        is_the_file = isinstance(collector, pytest.File) and str(collector.path) == self._collection.path
        self._collection.is_reached |= is_the_file
        try:
            with own_streams():
                report = yield
        except SystemExit as exits:
            # pytest would exit, too.
            if is_the_file:
                self._collection.import_error = exits
            raise
        has_passed = report.outcome == "passed"
        if isinstance(collector, pytest.Module) and is_the_file:
            module = collected_files.imported_module(collector)
            if module is not None:
                self._collection.module = module
            elif not has_passed:
                error = report.call.excinfo.value
                self._collection.import_error = _unwrapped(error)
                return report
        if not has_passed:
            self._collection.failures.append((names_of_classes(collector), report.longreprtext.strip()))
        return report

    def pytest_deselected(self, items: Iterable[Any]) -> None:
        self._collection.deselected.extend(items)

    # pytest does not count what these two hooks drop.

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_collection_modifyitems(self, items: list[Any]) -> Generator[None, Any, Any]:
        before = list(items)
        result = yield
        known = {item.nodeid for item in (*items, *self._collection.deselected)}
        self._collection.deselected.extend(item for item in before if item.nodeid not in known)
        return result

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_pycollect_makeitem(self, collector: Any, name: str, obj: Any) -> Generator[None, Any, Any]:
        made = yield
        if made == [] and _is_test(collector, name, obj):
            self._collection.dropped.append((*names_of_classes(collector), name))
        return made


def _is_test(collector: Any, name: str, obj: Any) -> bool:
    """Whether something in a module or a class is a test, or a class of tests, by its name or its kind."""
    if isinstance(obj, type) and issubclass(obj, unittest.TestCase):
        return True
    return bool(collector.istestfunction(obj, name) or collector.istestclass(obj, name))


@contextmanager
def own_streams() -> Iterator[None]:
    """Put the streams back which an import replaces, by None for example, as pytest does where it captures output."""
    before = sys.stdout, sys.stderr
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before


def _unwrapped(error: BaseException) -> BaseException:
    """The error of an import as it was raised; of pytest.skip in a wrong place, what pytest says of it."""
    cause = error.__cause__
    if not isinstance(error, pytest.Collector.CollectError) or cause is None:
        return error
    if not isinstance(cause, pytest.skip.Exception):
        return cause
    error.__cause__ = None
    error.__suppress_context__ = True
    return error.with_traceback(None)


def names_of_classes(node: Any) -> tuple[str, ...]:
    return tuple(parent.name for parent in node.listchain() if isinstance(parent, pytest.Class))


def _package(plugin: Any) -> str:
    """The top-level package that a plugin, a module or an object, is from."""
    module = plugin.__name__ if isinstance(plugin, ModuleType) else type(plugin).__module__
    return str(module).partition(".")[0]

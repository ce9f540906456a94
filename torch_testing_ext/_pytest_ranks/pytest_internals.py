"""Every private name of pytest that we use, behind one that says what we use it for. Imports no torch.

Versions 7.4 to 9.2 have each of them, unless its function names fewer. `test_internals.py` tries all with the version
that is installed.
"""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import io
import logging
import os
import sys
import types
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any, TextIO

import pytest
from _pytest._code.code import (
    ExceptionChainRepr,
    ReprEntryNative,
    ReprExceptionInfo,
    ReprFileLocation,
    ReprTraceback,
)
from _pytest._io import TerminalWriter
from _pytest.config import ConftestImportFailure, _prepareconfig, create_terminal_writer
from _pytest.debugging import _enter_pdb
from _pytest.junitxml import xml_key
from _pytest.logging import caplog_handler_key, caplog_records_key, catching_logs
from _pytest.skipping import evaluate_xfail_marks, xfailed_key
from _pytest.unittest import UnitTestCase

from torch_testing_ext._tests.source_files import is_library

# The fixtures of pytest that stand for setup_module, setup_class and unittest's fixtures begin so.
UNITTEST_FIXTURE = "_unittest_setUpClass_"
XUNIT_FIXTURES = ("_xunit_setup_", UNITTEST_FIXTURE)
# Plugins of pytest by the names that it registers them with.
DEBUGGER, TRACE, TERMINAL = "pdbinvoke", "pdbtrace", "terminalreporter"
# These remember which tests have failed. In 7.4, "stepwise" also forgets that, in a file.
REMEMBERING = ("lfplugin", "nfplugin", "stepwiseplugin", "stepwise")


def exception_info(error: BaseException) -> pytest.ExceptionInfo[BaseException]:
    """An error that was raised, as pytest's hooks get it. `ExceptionInfo.from_exception`: since 7.4."""
    assert error.__traceback__ is not None
    return pytest.ExceptionInfo.from_exc_info((type(error), error, error.__traceback__))


def failure_text(item: Any, error: BaseException) -> str:
    """The text that pytest shows of an error; the last function in full only if it is the project's."""
    raised = exception_info(error)
    shown = item.repr_failure(raised)
    if isinstance(shown, ExceptionChainRepr) and item.config.getoption("tbstyle", "auto") == "auto":
        short = item._repr_failure_py(raised, style="short")
        for (traceback, *_), (of_short, *_) in zip(shown.chain, short.chain, strict=True):
            *entries, last = traceback.reprentries
            place = getattr(last, "reprfileloc", None)
            if place is not None and is_library(place.path):
                traceback.reprentries = [*entries, of_short.reprentries[-1]]
    return str(shown)


# -- a session


def make_config(arguments: list[str], plugins: list[Any]) -> Any:
    """Read pytest's command line, load plugins and configure them, as pytest.main does first."""
    # By which programs know, since 8.2, that pytest runs them.
    os.environ["PYTEST_VERSION"] = pytest.__version__
    config = _prepareconfig(arguments, plugins)
    config._do_configure()
    return config


def settings(config: Any) -> tuple[list[str], list[str]]:
    """The settings that the project has and pytest does not know, and those that pytest knows."""
    return sorted(config._get_unknown_ini_keys()), list(config._parser._inidict)


def known_options() -> Mapping[str, bool]:
    """The options that pytest has in the working directory, by name, each with whether it takes a value.

    Its own, of plugins and of conftest files.
    """
    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        try:
            config = _prepareconfig(["--capture=no"], [])
        except (Exception, SystemExit):
            return {}
    parser = config._parser
    groups = [parser._anonymous, *parser._groups]
    without_value = ("store_true", "store_false", "store_const", "append_const", "count", "help", "version")
    names = {}
    for option in (option for group in groups for option in group.options):
        attributes = option.attrs()
        takes_value = attributes.get("action") not in without_value and attributes.get("nargs") not in (0, "?")
        names.update(dict.fromkeys(option.names(), takes_value))
    config._ensure_unconfigure()
    return names


# The title of the options of pytest and of plugins that change what a run shows, and no outcome.
_REPORTING = "Reporting"


class _Recorder(argparse.Action):
    """Records an option as words, in place of what it does."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        several = values if isinstance(values, list) else [] if values is None else [values]
        words = [str(option_string), *several]
        # A value may begin with a dash.
        is_long = len(words) == 2 and words[0].startswith("--")
        getattr(namespace, self.dest).extend(["=".join(words)] if is_long else words)


def options_again(config: pytest.Config) -> list[str]:
    """The options on the command line of a run, as words, without those that only report."""
    # In a process of xdist, they are those of the run.
    given = config.workerinput["mainargv"][1:] if hasattr(config, "workerinput") else config.invocation_params.args
    of_run: Any = config._parser.optparser
    parser = argparse.ArgumentParser(
        add_help=False, allow_abbrev=False, fromfile_prefix_chars=of_run.fromfile_prefix_chars
    )
    for group in of_run._action_groups:
        for action in group._group_actions:
            if action.option_strings:
                dest = "reporting" if group.title == _REPORTING else "deciding"
                parser.add_argument(*action.option_strings, dest=dest, nargs=action.nargs, action=_Recorder)
    recorded = argparse.Namespace(reporting=[], deciding=[])
    parser.parse_known_args([str(word) for word in given], recorded)
    return list(recorded.deciding)


def add_property(config: pytest.Config, name: str, value: object) -> None:
    """Add a property of the whole run to the JUnit file, if there is to be one."""
    xml = config.stash.get(xml_key, None)
    if xml is not None:
        xml.add_global_property(name, value)


@contextmanager
def whole_paths() -> Iterator[None]:
    """Let arguments that are paths of files and folders mean these, whatever their names are.

    pytest reads `[` and `::` as the beginning of a test's name, wherever they are.
    """
    # Its parameters differ between versions.
    main: Any = sys.modules[pytest.Session.__module__]
    original = main.resolve_collection_argument

    def resolve(invocation_path: Path, argument: str, *more: Any, **options: Any) -> Any:
        parts = str(argument).split("::")
        paths = ["::".join(parts[:length]) for length in range(len(parts), 0, -1)]
        existing = next((path for path in paths if (invocation_path / path).exists()), "")
        if "[" not in existing and "::" not in existing:
            return original(invocation_path, argument, *more, **options)
        test = str(argument).removeprefix(existing)
        path = invocation_path / existing
        # Any file that exists.
        resolved: Any = original(invocation_path, f"{os.devnull if path.is_file() else os.sep}{test}", *more, **options)
        if isinstance(resolved, tuple):
            return (path, *resolved[1:])
        return dataclasses.replace(resolved, path=path)

    main.resolve_collection_argument = resolve
    try:
        yield
    finally:
        main.resolve_collection_argument = original


def leads_to(path: Path, file: Path) -> bool:
    """Whether a collection that may only look at this path can come to the file."""
    if path == file or path in file.parents:
        return True
    # Before version 8, this file stands for its folder.
    return not hasattr(pytest, "Directory") and path.name == "__init__.py" and path.parent in file.parents


def name_in_file(node: Any) -> str:
    """The name of a test or class in its file, as in `TestA::test_x[1]`: the path may have `::`, too."""
    file = node.getparent(pytest.File)
    if file is None:
        return str(node.nodeid.partition("::")[2])
    return str(node.nodeid.removeprefix(f"{file.nodeid}::"))


def unconfigure(config: Any) -> None:
    """Undo `make_config`, as pytest.main does last."""
    config._ensure_unconfigure()


def finish_without_tear_down(session: Any) -> None:
    """End a session as pytest.main does, but leave its fixtures to a test that does not return."""
    manager = session.config.pluginmanager
    finish = manager.subset_hook_caller("pytest_sessionfinish", [manager.get_plugin("runner")])
    finish(session=session, exitstatus=session.exitstatus)


def redirect_terminal(config: Any, stream: TextIO) -> Any:
    """Let pytest's terminal reporter write to a stream; return the reporter, None without one."""
    reporter: Any = config.pluginmanager.get_plugin(TERMINAL)
    if reporter is not None:
        reporter._tw = create_terminal_writer(config, stream)
    return reporter


def temporary_base(config: Any) -> Path:
    """The folder of this session below which `tmp_path` makes folders."""
    return Path(config._tmp_path_factory.getbasetemp())


def failed_conftest(error: BaseException) -> tuple[Path, BaseException | None] | None:
    """The conftest.py whose import raised, and the exception; None for any other error."""
    if not isinstance(error, ConftestImportFailure):
        return None
    return error.path, error.__cause__


def is_file(collector: Any) -> bool:
    """Whether a collector is of one file. Before version 8, one of a package is of a file, too."""
    return isinstance(collector, pytest.File) and not isinstance(collector, pytest.Package)


def imported_module(collector: Any) -> types.ModuleType | None:
    """The module of a collector, if it has been imported: its public name `obj` would import it."""
    module = getattr(collector, "_obj", None)
    return module if isinstance(module, types.ModuleType) else None


# -- fixtures


def fixture_definitions(item: Any) -> dict[str, tuple[Any, ...]]:
    """The definitions of each fixture that a test uses: several, if one overrides another."""
    info = getattr(item, "_fixtureinfo", None)
    return {name: tuple(those) for name, those in info.name2fixturedefs.items()} if info is not None else {}


def fixtures_of(module: Mapping[str, Any]) -> list[str]:
    """The names of the fixtures that a module defines. `_pytestfixturefunction`: before 8.4."""
    names = []
    for name, value in module.items():
        marker = getattr(value, "_fixture_function_marker", None) or getattr(value, "_pytestfixturefunction", None)
        if marker is not None:
            names.append(marker.name or name)
    return names


def is_parameter(definition: Any) -> bool:
    """Whether a definition stands for a parameter of pytest.mark.parametrize."""
    return bool(definition.func.__name__ == "get_direct_param_fixture_func")


def is_fixture(function: Any) -> bool:
    """Whether a function is a fixture, before 8.4: since then a fixture is not a function."""
    return hasattr(function, "_pytestfixturefunction")


def add_fixtures(collector: Any, holder: types.ModuleType) -> None:
    """Let the tests of a collector find the fixtures in a module."""
    manager = collector.session._fixturemanager
    if "holder" in inspect.signature(manager.parsefactories).parameters:  # since 9.1
        manager.parsefactories(holder=holder, node=collector)
    else:
        manager.parsefactories(holder, collector.nodeid)


def fill_fixtures(item: Any) -> None:
    """Set up the fixtures of a test that are not in its `funcargs` yet."""
    item._request._fillfixtures()


def finalizers(item: Any) -> list[Any]:
    """The functions that tear a test down, the last first: changing the list changes what pytest calls."""
    those: list[Any] = item.session._setupstate.stack[item][0]
    return those


def take_over(session: Any, scope: str, names: tuple[str, ...]) -> None:
    """Leave the tear-down of all that is set up to the parent, in a process forked off it; widen these fixtures."""
    for finalizers, _ in session._setupstate.stack.values():
        finalizers.clear()
    for item in session.items:
        for definition in (
            found_definition for name in names for found_definition in fixture_definitions(item).get(name, ())[:1]
        ):
            definition._scope = type(definition._scope)(scope)


def set_up_in_session(item: Any) -> None:
    """Set a test up with all its fixtures, after the tear-down of what the previous test had and it does not need."""
    item.session._setupstate.teardown_exact(item)
    item._initrequest()
    item.session._setupstate.setup(item)


def take_finalizers(item: Any) -> list[Any]:
    """Take the functions that tear a test down away from pytest, if the test has been set up."""
    those: list[Any] = item.session._setupstate.stack.pop(item, ([], None))[0]
    return those


def tear_down_session(session: Any) -> None:
    session._setupstate.teardown_exact(None)


# -- tests of unittest


def argument_names(item: Any) -> tuple[str, ...]:
    """The fixtures and parameters with which pytest calls the function of a test."""
    return tuple(item._fixtureinfo.argnames)


def is_of_unittest(item: Any) -> bool:
    """Whether a test is a method of a unittest.TestCase."""
    return isinstance(item.parent, UnitTestCase)


def kept_errors(item: Any) -> list[BaseException]:
    """The exceptions of a test of unittest, which pytest keeps instead of raising them."""
    return [excinfo.value for excinfo in getattr(item, "_excinfo", None) or ()]


def postponed_tear_down(item: Any) -> Any:
    """The `tearDown` of a test of unittest that --pdb postpones; None without one."""
    return getattr(item, "_explicit_tearDown", None)


# -- outcomes


def skip_at_test(reason: str) -> Any:
    """A skip that is reported with the line of the test, and not with the line that raises it."""
    return pytest.skip.Exception(reason, _use_item_location=True)


def is_marked_xfail(item: Any) -> bool:
    """Whether pytest has found that a test is expected to fail, by a mark that holds."""
    return item.stash.get(xfailed_key, None) is not None


def read_xfail_marks(item: Any) -> None:
    """Let pytest take notice of marks that a test has added while it ran."""
    item.stash[xfailed_key] = evaluate_xfail_marks(item)


def text_of(report: Any) -> str:
    """The text of a report as pytest shows it. `longreprtext` cuts off the indentation of the first line."""
    stream = io.StringIO()
    writer = TerminalWriter(stream)
    writer.hasmarkup = False
    report.toterminal(writer)
    return stream.getvalue().rstrip().lstrip("\n")


def plain_text(text: str, path: str, line: int, summary: str) -> Any:
    """Make a text that a report shows in place of a traceback. `line` counts from 1."""
    traceback = ReprTraceback([ReprEntryNative([f"{text}\n"])], None, "native")
    return ReprExceptionInfo(traceback, ReprFileLocation(path, line, summary))


class _ColouredText(ReprEntryNative):
    """The text of a failure, with the style of each of its first lines."""

    def __init__(self, lines: list[str], styles: list[str]):
        super().__init__(lines)
        self._styles = styles

    def toterminal(self, tw: TerminalWriter) -> None:
        for at, line in enumerate(self.lines[0].rstrip("\n").split("\n")):
            style = self._styles[at] if at < len(self._styles) else None
            tw.line(line, **({style: True} if style else {}))


_ColouredText.__name__ = ReprEntryNative.__name__  # by which xdist sends it


def colour(report: Any) -> None:
    """Let a report of a failure on one screen, which may come from a worker of xdist, have colours."""
    styles = getattr(report, "line_styles", None)
    entries: Any = getattr(getattr(report.longrepr, "reprtraceback", None), "reprentries", ())
    if styles and len(entries) == 1 and type(entries[0]) is ReprEntryNative:
        entries[0] = _ColouredText([*entries[0].lines], styles)


# -- debugging, output


def enter_debugger(item: Any, excinfo: Any, report: Any) -> None:
    """Open the debugger of --pdb at an exception. Raises pytest.exit.Exception when the user quits."""
    _enter_pdb(item, excinfo, report)


def capture_manager(config: Any) -> Any:
    """The plugin that captures output: it can `suspend`, `resume`, and read what it has captured. None without it."""
    return config.pluginmanager.get_plugin("capturemanager")


def forget_captured(config: Any) -> None:
    """Capture no longer into the files of the parent: for a process that has been forked off it."""
    if (manager := capture_manager(config)) is not None:
        manager._global_capturing = None


def log_handlers(config: Any) -> tuple[Any, Any] | None:
    """The handlers by which pytest logs to the terminal and into reports; None without its plugin for logging."""
    plugin = config.pluginmanager.get_plugin("logging-plugin")
    return None if plugin is None else (plugin.log_cli_handler, plugin.report_handler)


def remove_log_handler(handler: logging.Handler) -> None:
    """Remove a handler of pytest from all loggers: from 9.1 on, it is on those, too, that do not propagate."""
    known = logging.getLogger().manager.loggerDict.values()
    for logger in (logging.getLogger(), *(candidate for candidate in known if isinstance(candidate, logging.Logger))):
        logger.removeHandler(handler)


def begin_caplog(item: Any, earlier: Any) -> None:
    """Let `caplog` record a test by the handler that has recorded an earlier one."""
    if (handler := earlier.stash.get(caplog_handler_key, None)) is not None:
        handler.reset()
        item.stash[caplog_handler_key], item.stash[caplog_records_key] = handler, {"call": handler.records}


def logging_to(handler: logging.Handler) -> Any:
    """A context in which a handler gets all records that a handler of pytest would get."""
    return catching_logs(handler)


def live_log(config: Any) -> tuple[int, logging.Formatter] | None:
    """With log_cli, the level and the format of what is shown on the terminal."""
    plugin = config.pluginmanager.get_plugin("logging-plugin")
    if plugin is None or not plugin._log_cli_enabled():
        return None
    return plugin.log_cli_level or 0, plugin.log_cli_handler.formatter


def live_terminal(config: Any) -> int | None:
    """A new descriptor of the terminal for what log_cli and --setup-show show there; None without them."""
    reporter, capture = config.pluginmanager.get_plugin(TERMINAL), capture_manager(config)
    if reporter is None or (live_log(config) is None and not config.getoption("setupshow", False)):
        return None
    with capture.global_and_fixture_disabled() if capture is not None else nullcontext():
        reporter.flush()
        try:
            return os.dup(reporter._tw._file.fileno())
        except (AttributeError, OSError, ValueError):  # it has no descriptor
            return None

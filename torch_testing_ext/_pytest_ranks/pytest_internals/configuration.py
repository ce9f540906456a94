"""The configuration of a run of pytest: its options, settings and plugins, and how it ends."""

from __future__ import annotations

import argparse
import io
import os
from collections.abc import Mapping
from contextlib import redirect_stderr, redirect_stdout
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from _pytest.config import ConftestImportFailure, _prepareconfig, default_plugins
from _pytest.junitxml import xml_key

# A configuration imports these: so they are there in each process that is forked from this one.
for _name in default_plugins:
    import_module(f"_pytest.{_name}")

# Its plugin for the terminal, by the name that it registers it with.
TERMINAL = "terminalreporter"
# These remember which tests have failed. In 7.4, "stepwise" also forgets that, in a file.
REMEMBERING = ("lfplugin", "nfplugin", "stepwiseplugin", "stepwise")


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


def unconfigure(config: Any) -> None:
    """Undo `make_config`, as pytest.main does last."""
    config._ensure_unconfigure()


def finish_without_tear_down(session: Any) -> None:
    """End a session as pytest.main does, but leave its fixtures to a test that does not return."""
    manager = session.config.pluginmanager
    finish = manager.subset_hook_caller("pytest_sessionfinish", [manager.get_plugin("runner")])
    finish(session=session, exitstatus=session.exitstatus)


def temporary_base(config: Any) -> Path:
    """The folder of this session below which `tmp_path` makes folders."""
    return Path(config._tmp_path_factory.getbasetemp())


def failed_conftest(error: BaseException) -> tuple[Path, BaseException | None] | None:
    """The conftest.py whose import raised, and the exception; None for any other error."""
    if not isinstance(error, ConftestImportFailure):
        return None
    return error.path, error.__cause__

"""Output: the captured text, the logs, and the text that the terminal shows at once."""

from __future__ import annotations

import logging
import os
from contextlib import nullcontext
from typing import Any, TextIO

from _pytest.config import create_terminal_writer
from _pytest.logging import caplog_handler_key, caplog_records_key, catching_logs

from .configuration import TERMINAL


def redirect_terminal(config: Any, stream: TextIO) -> Any:
    """Let pytest's terminal reporter write to a stream; return the reporter, None without one."""
    reporter: Any = config.pluginmanager.get_plugin(TERMINAL)
    if reporter is not None:
        reporter._tw = create_terminal_writer(config, stream)
    return reporter


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

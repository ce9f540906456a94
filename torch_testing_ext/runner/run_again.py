"""The commands that run a test again, and that show its failure."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

from torch_testing_ext._process import shell_words, user_commands
from torch_testing_ext._process.project_folder import is_checkout
from torch_testing_ext._process.setting_readers import read_boolean
from torch_testing_ext._tests.kept_failures import CACHE
from torch_testing_ext.launch.aspects import ASPECTS

from .options import OPTION_TABLE, Level, Options, OptionSpec
from .options.names import setting_name, shown_value


def command(options: Options) -> str:
    """The command that reruns a test whose name is appended to it."""
    written = _as_written(options)
    defaults = Options()
    words = [user_commands.runner()]
    if any(aspect.words_again(options, 0) for aspect in ASPECTS):
        # One repetition is named.
        written = dataclasses.replace(written, repeat=None, overriding=written.overriding - {"repeat"})
    for field, spec in OPTION_TABLE.items():
        value = getattr(written, field)
        is_meant = not spec.needs or getattr(options, spec.needs)
        is_set = field in written.overriding or value != getattr(defaults, field)
        if spec.in_command and is_meant and is_set:
            words += [_word(field, spec, item) for item in (value if spec.many else (value,))]
    return " ".join(words)


def _as_written(options: Options) -> Options:
    """The options as one writes them in the working directory."""
    if not options.drop_in:
        return dataclasses.replace(options, cache=_relative(options.cache))
    root = options.drop_in_root
    places = (root,) if root is not None and is_checkout(root) else options.drop_in
    # Dropped-in tests have a cache of their own.
    return dataclasses.replace(
        options, drop_in=places, cache=Options().cache, overriding=options.overriding - {"cache"}
    )


def _relative(path: Path) -> Path:
    return Path(os.path.relpath(path))


def _word(field: str, spec: OptionSpec, value: Any) -> str:
    write = spec.write or shown_value
    text = shell_words.quote(write(value))
    if spec.level is Level.SETTING or spec.read is read_boolean:
        return f"-o {setting_name(field)}={text}"
    return f"{spec.flags[0]}={text}" if spec.alone else f"{spec.flags[0]} {text}"


def of_repetition(command: str, options: Options, repetition: int) -> str:
    """The command for a test of this repetition."""
    return " ".join([command, *filter(None, (aspect.words_again(options, repetition) for aspect in ASPECTS))])


def show_command(options: Options) -> str:
    """The command that shows all about the failure of a test of this run, whose name is appended to it."""
    words = [user_commands.runner(), user_commands.SHOW]
    if options.journal is not None:
        words.append(f"--journal {shell_words.quote(os.path.relpath(options.journal))}")
    elif (cache := os.path.relpath(options.cache)) != CACHE:
        words.append(f"--cache {shell_words.quote(cache)}")
    return " ".join(words)

"""The parser of a command line."""

from __future__ import annotations

import argparse
import difflib
import importlib.metadata
import importlib.util
import itertools
import os
import platform
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NoReturn

from torch_testing_ext import __version__
from torch_testing_ext._process import user_commands
from torch_testing_ext._process.setting_readers import read_boolean
from torch_testing_ext.launch.aspects import ASPECTS

from .all_options import OPTION_TABLE, Options
from .commands import COMMANDS
from .declaring import Level, OptionSpec
from .names import setting_name, shown_value
from .readers import read_pytest_options, why_not_for_pytest
from .values import UsageError


@dataclass(frozen=True)
class ParsedWords:
    """The options of a command line."""

    # The values of options, by field.
    values: Mapping[str, Any]
    # Names and texts of settings, by -o.
    overrides: Sequence[tuple[str, str]]
    # A line for each option of PyTorch's that has no effect.
    notes: Sequence[str] = ()


EXIT_CODES = """\
exit codes:
  0 passed, 1 failed, 2 interrupted, 3 internal error, 4 usage error,
  5 no test was selected, 6 all were skipped for lack of devices"""
# The note beside both forms of -x.
_OF_PYTORCH = "In torchtest, -x stops the run at the first failure, as in pytest."
# The other names of options, which are in --help-all, not in --help.
ALIASES = frozenset(
    (
        *("--override-ini", "--reruns", "--junit-xml", "--collect-only", "--co", "--list=json"),
        *("--keyword", "--marks"),
    )
)
# By a flag that there was, or that another runner has: what to write instead.
_INSTEAD = {
    "--shake": "--repeat N --delays (a seed: --delays=SEED)",
    "--show-config": "torchtest config",
    **dict.fromkeys(("--ff", "--failed-first"), "--last-failed"),
    "--exclude": "--deselect ID, -k 'not NAME', or the setting exclude",
    "--fail-fast": "-x",
    "--max-fail": "--maxfail N",
    **dict.fromkeys(("--stress-count", "--count"), "--repeat N"),
    **dict.fromkeys(("--random-order", "--randomly-seed"), "--shuffle"),
    **dict.fromkeys(("--ranks", "--np", "--nproc", "--nproc-per-node"), "--world-size N"),
    "--rank": "--trace=RANK to stop in a rank",
    **dict.fromkeys(("--kill", "--fault", "--faults"), "@pytest.mark.faults(faults.kill(...)) on the test"),
    "--no-capture": "-s",
}

# Similarity of flags that are taken for one another: many are short, and alike by chance.
_ALIKE = 0.66
# What argparse says.
_APART = "not allowed with argument "
_NO_VALUE = "ignored explicit argument "
# Examples of values that are not numbers, by the option's first flag.
_EXAMPLES = {
    "-k": ": a part of names, such as -k 'sum and not slow'",
    "-m": ": an expression of marks, such as -m 'not slow'",
    "--html": ": a file, such as --html report.html",
    "--junitxml": ": a file, such as --junitxml report.xml",
    "--shard": ": a part of a number of parts, such as --shard 1/3",
    "--repeat": ": a number of runs, such as --repeat 20",
    "--gpus": ": a number or a list, such as --gpus 0,2",
}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        message = message.removeprefix("argument ")
        flags, _, what = message.partition(": ")
        flag = flags.partition("/")[0]
        with_values = [known for known in _const_flags() if known.startswith(f"{flag}=")]
        if what == "expected one argument":
            message = f"{flag} needs a value{_EXAMPLES.get(flag, '')}"
        elif what.startswith(_APART):
            other = what.removeprefix(_APART).partition("/")[0]
            message = f"{flag} and {other} cannot be combined. Leave out one of them"
        elif what.startswith(_NO_VALUE) and with_values:
            message = (
                f"{flag}: {what.rpartition(' ')[2]} is not one of its values. Use {flag} or {', '.join(with_values)}"
            )
        elif what.startswith(_NO_VALUE):
            of_rank = ", or use --trace=RANK to stop in one rank" if flag == "--pdb" else ""
            message = f"{flag} takes no value: leave out {what.removeprefix(_NO_VALUE)}{of_rank}"
        raise UsageError(f"{message} (--help lists the options)")


def parse_words(argv: Sequence[str], command: str, as_pytorch: bool) -> ParsedWords:
    """The options in the words after a command. Raises UsageError; SystemExit for a help that it prints."""
    arguments = _Arguments(command, as_pytorch)
    notes: Sequence[str] = ()
    if as_pytorch and not command:
        from .pytorch_words import as_ours

        argv, notes = as_ours(argv)
    # After `--`, all words are for pytest.
    end = argv.index("--") if "--" in argv else len(argv)
    argv, of_pytest = argv[:end], argv[end + 1 :]
    if "--help-all" in argv:
        arguments.print_help(Level.SETTING)
    if "--version" in argv and not command:
        print(version_line())
        raise SystemExit(0)
    if "-h" in argv or "--help" in argv:
        arguments.print_help(Level.HELP)
    parsed, unknown = arguments.parser().parse_known_intermixed_args(_with_values(argv))
    if unknown:
        after = argv[argv.index(unknown[0]) + 1 :] if unknown[0] in argv else []
        raise UsageError(arguments.advice_on(unknown[0], after[0] if after else ""))
    values = {}
    for field, value in vars(parsed).items():
        values[field] = tuple(value) if isinstance(value, list) else value
    if of_pytest and command:
        raise UsageError(f"{command} passes nothing to pytest: leave out -- and the words after it")
    if of_pytest:
        try:
            values["pytest"] = read_pytest_options(shlex.join(of_pytest))
        except ValueError as error:
            raise UsageError(str(error)) from None
    overrides = values.pop("overrides", ())
    return ParsedWords(values, overrides, notes)


def version_line() -> str:
    """The version of this package, and those of what results depend on."""
    versions = [f"torch-testing-ext {__version__}"]
    for name in ("torch", "pytest", "hypothesis"):
        with suppress(importlib.metadata.PackageNotFoundError):
            versions.append(f"{name} {importlib.metadata.version(name)}")
    return f"{', '.join(versions)}, Python {platform.python_version()}"


def _with_values(argv: Sequence[str]) -> list[str]:
    """The words, in which each flag that may be alone has its value: the next word, if that can only be one."""
    may_be_alone = {flag: spec for spec in OPTION_TABLE.values() if spec.alone for flag in spec.flags}
    words = [""]
    for word in argv:
        flag = words[-1]
        if flag in may_be_alone and _is_value(may_be_alone[flag], word):
            words[-1] = f"{flag}={word}"
        else:
            words.append(word)
    return [f"{word}={may_be_alone[word].alone}" if word in may_be_alone else word for word in words[1:]]


def _is_value(spec: OptionSpec, word: str) -> bool:
    """Whether a word after a flag that may be alone is meant as its value, and is not the name of a test."""

    def can_be_read(text: str) -> bool:
        with suppress(ValueError):
            spec.read(text)
            return True
        return False

    # An option that takes any text has no values that tell them from names.
    return can_be_read(word) and not can_be_read("test_x.py") and not os.path.exists(word)


def _const_flags() -> list[str]:
    return [name for spec in OPTION_TABLE.values() for value in spec.values for name in value.names]


def _override(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE")
    return name, value


class _Arguments:
    """The options of a command, or without one, of a run of tests."""

    def __init__(self, command: str, as_pytorch: bool):
        self._command = COMMANDS.get(command)
        self._name = command
        self._as_pytorch = as_pytorch
        self._pytorch_flags: set[str] = set()
        if as_pytorch:
            self._pytorch_flags.update(flag for spec in OPTION_TABLE.values() for flag in spec.of_pytorch)

    def parser(self) -> argparse.ArgumentParser:
        """The parser of the words."""
        parser = _Parser(argument_default=argparse.SUPPRESS, allow_abbrev=False, add_help=False)
        for field, spec in OPTION_TABLE.items():
            if self._has(field):
                # A run does one thing.
                owner = parser.add_mutually_exclusive_group() if field == "action" else parser
                for names, more in self._arguments(field, spec):
                    owner.add_argument(*names, **more)
        _add_override(parser, "-o", "--override-ini")
        return parser

    def print_help(self, level: Level) -> NoReturn:
        """Print the options of this level and those before, and exit."""
        usage = [user_commands.runner(), *([self._name] if self._name else [])]
        words = self._command.usage if self._command else "[options] [NAME ...] [-- PYTEST OPTIONS]"
        parser = _Parser(
            usage=" ".join([*usage, words]),
            description=self._command.description if self._command else "Run distributed tests in parallel.",
            epilog=None if self._command else self._epilog(level),
            formatter_class=_HelpFormatter,
            add_help=False,
        )
        for title, specs in itertools.groupby(OPTION_TABLE.items(), lambda item: item[1].group):
            group = parser.add_argument_group(title)
            for field, spec in specs:
                if self._has(field) and self._lists(field, spec, level):
                    for names, more in self._arguments(field, spec):
                        hidden = () if level is Level.SETTING else ALIASES
                        if shown := [name for name in names if name not in hidden]:
                            group.add_argument(*shown, **more)
        _add_override(group, "-o")
        group.add_argument("-h", "--help", action="help", help="show this help")
        if not self._command:
            group.add_argument("--help-all", action="help", help="show all options and settings")
            group.add_argument("--version", action="help", help="show the versions")
        if level is Level.SETTING:
            _add_settings(parser)
        parser.print_help()
        raise SystemExit(0)

    def _has(self, field: str) -> bool:
        return self._command is None or field in ("names", *self._command.options)

    def _lists(self, field: str, spec: OptionSpec, level: Level) -> bool:
        if self._command:
            return field != "names"
        levels = list(Level)
        return bool(self._pytorch_flags & set(spec.of_pytorch)) or levels.index(spec.level) <= levels.index(level)

    def _epilog(self, level: Level) -> str:
        shown = {name: command for name, command in COMMANDS.items() if level is Level.SETTING or not command.is_rare}
        width = max(map(len, shown))
        lines = [f"  {name:{width}}  {command.summary}" for name, command in shown.items()]
        about_x = [_OF_PYTORCH, ""] if self._as_pytorch else []
        return "\n".join([*about_x, "commands, each with a --help:", *lines, "", EXIT_CODES])

    def advice_on(self, word: str, after: str) -> str:
        """The message on a flag that does not exist. `after`: the next word, which may be its value."""
        flag = word.partition("=")[0]
        flags = ["--help", "--override-ini"]
        if not self._command:
            flags += ["--help-all", "--version"]
        by_name = {}
        for field, spec in OPTION_TABLE.items():
            if self._has(field):
                if spec.level is Level.SETTING:
                    by_name[field.replace("_", "-")] = f"-o {setting_name(field)}=VALUE"
                for names, _ in self._arguments(field, spec):
                    flags += names
        # Names are compared without dashes: all flags begin alike.
        by_name.update((known.lstrip("-"), known) for known in flags)
        bare = flag.lstrip("-")
        near = [name for name in by_name if len(bare) > 2 and bare in name.split("-")]
        near = near[:3] or difflib.get_close_matches(bare, by_name, cutoff=_ALIKE)
        advice = f" Did you mean: {', '.join(by_name[name] for name in near)}?" if near else ""
        instead = {option.flag: option.instead for aspect in ASPECTS for option in aspect.options if option.instead}
        if not self._command and (used := (instead | _INSTEAD).get(flag)):
            return f"{flag} is not an option. Use {used}"
        if self._command:
            return f"{self._name} has no option {flag}.{advice} ({self._name} --help lists its options)"
        why = why_not_for_pytest(flag)
        if why:
            return f"{flag} is an option of pytest: {why}"
        name = flag if flag.startswith("--") else flag[:2]
        takes_value = _known_to_pytest().get(name)
        if takes_value is not None:
            value = f" {shlex.quote(after)}" if takes_value and word == name and after[:1] not in ("", "-") else ""
            return f"{flag} is an option of pytest: write it after --, as in torchtest -- {word}{value}"
        return f"{flag} is not an option.{advice} (--help lists the options)"

    def _arguments(self, field: str, spec: OptionSpec) -> Iterator[tuple[tuple[str, ...], dict[str, Any]]]:
        """The arguments of argparse's add_argument for an option: for each of its flags, or for the option itself."""
        for value in spec.values:
            names = tuple(name for name in value.names if name not in self._pytorch_flags)
            yield names, {"dest": field, "action": "store_const", "const": value.value, "help": value.help}
        if field == "names":
            yield (field,), {"nargs": "*", "metavar": spec.metavar, "help": spec.help}
            return
        if self._as_pytorch and spec.of_pytorch:
            yield spec.of_pytorch, {**_valued(field, spec), "nargs": "+", "action": "extend", "metavar": spec.metavar}
        flags = tuple(flag for flag in spec.flags if flag not in self._pytorch_flags)
        is_of_others = not self._command and spec.level in (Level.SETTING, Level.OF_COMMANDS)
        if not flags or is_of_others:
            return
        if spec.read is read_boolean:
            yield flags, {"dest": field, "action": "store_const", "const": True, "help": spec.help}
        else:
            yield flags, _valued(field, spec)


def _known_to_pytest() -> Mapping[str, bool]:
    """The options of pytest, its plugins and the project, each with whether it takes a value.

    None without pytest, or if the project's cannot be read.
    """
    if importlib.util.find_spec("pytest") is None:
        return {}
    from torch_testing_ext._pytest_ranks.pytest_internals import configuration

    known: Mapping[str, bool] = configuration.known_options()
    return known


def _valued(field: str, spec: OptionSpec) -> dict[str, Any]:
    return {
        "dest": field,
        "type": _type_of(spec),
        "action": "append" if spec.many else "store",
        "metavar": f"[={spec.metavar}]" if spec.alone else spec.metavar,
        "help": spec.help + _default_text(field, spec),
    }


def _add_override(parser: Any, *names: str) -> None:
    parser.add_argument(
        *names,
        dest="overrides",
        action="append",
        type=_override,
        metavar="NAME=VALUE",
        help="change a setting of pyproject.toml",
    )


def _add_settings(parser: argparse.ArgumentParser) -> None:
    """List what only configuration files, variables and -o set."""
    group = parser.add_argument_group(
        "settings",
        "Write them in [tool.torch_testing_ext] of pyproject.toml, or -o NAME=VALUE.\n"
        "Most options above are settings too; torchtest config lists their names.",
    )
    for field, spec in OPTION_TABLE.items():
        if spec.level is Level.SETTING:
            value = spec.metavar or "true|false"
            group.add_argument(
                field, metavar=f"{setting_name(field)}={value}", help=spec.help + _default_text(field, spec)
            )


class _HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Help with the value of an option once, after all its flags."""

    def __init__(self, prog: str):
        super().__init__(prog, max_help_position=30)

    def _format_action_invocation(self, action: argparse.Action) -> str:
        if not action.option_strings or action.nargs == 0:
            return super()._format_action_invocation(action)
        value = str(action.metavar)
        names = ", ".join(action.option_strings)
        many = " ..." if action.nargs == "+" else ""
        return f"{names}{value}" if value.startswith("[=") else f"{names} {value}{many}"


def _default_text(field: str, spec: OptionSpec) -> str:
    """` (default: 300)`, unless there is no default or the help already says it."""
    value = getattr(Options(), field)
    if value is None or value in ((), "") or "(default: " in spec.help:
        return ""
    shown = f"{value:g}" if isinstance(value, float) else shown_value(value)
    return f" (default: {shown})"


def _type_of(spec: OptionSpec) -> Callable[[str], Any]:
    def read(text: str) -> Any:
        try:
            return spec.read(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return read

"""The command that runs a test again, as the tests of this process were invoked.

A module that runs tests in another way (upstream's drop-in) sets the variables before it imports the tests.
"""

import os
import sys
import unittest
from typing import Any

from torch_testing_ext import launch
from torch_testing_ext._process import user_commands
from torch_testing_ext._tests.source_files import source_file

# The arguments between `python` and the file.
python_arguments: list[str] = []


def case_of(name: str, file: str, rerun_command: str = "", show_command: str = "") -> launch.Case:
    """The case of a test of this name. Unless a runner keeps its account, and shows it by a command, a file has it."""
    if show_command:
        return launch.Case(name, rerun_command, file, "", show_command, "")
    kept_as = f"{user_commands.relative(file)}::{name}" if file else name
    return launch.Case(name, rerun_command, file, "", user_commands.to_show(name), kept_as)


def case_of_test(test: unittest.TestCase, result: Any) -> launch.Case:
    cls = type(test)
    show_command_of = getattr(result, "show_command_of", None)
    show = "" if show_command_of is None else show_command_of(test)
    name = f"{cls.__qualname__}.{test._testMethodName}"
    return case_of(name, source_file(cls), command_of(test, result), show)


def command_of(test: unittest.TestCase, result: Any) -> str:
    """Return the command that runs just this test again. The `result` object of pytest or our runner knows its own."""
    command_of_result = getattr(result, "command_of", None)
    if command_of_result is not None:
        return str(command_of_result(test))
    cls = type(test)
    file = user_commands.relative(source_file(cls) or "?")
    name = f"{cls.__qualname__}.{test._testMethodName}"
    if cls.__module__ == "__main__":
        # Only `python -m` sets the spec of the main module.
        spec = getattr(sys.modules["__main__"], "__spec__", None)
        module = getattr(spec, "name", None)
        main = ["-m", module] if module else [file]
        return user_commands.command(*python_arguments, *main, name)
    if file == cls.__module__.replace(".", os.sep) + ".py":
        return user_commands.command("-m", "unittest", f"{cls.__module__}.{name}")
    # unittest found it from another folder: from this one, the module cannot be imported by its name.
    folder, base = os.path.split(file)
    return user_commands.command("-m", "unittest", "discover", "-s", folder or ".", "-p", base, "-k", f"*.{name}")

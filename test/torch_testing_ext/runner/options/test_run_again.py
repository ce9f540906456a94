"""The command that runs a test again has the options that decide how it ends, as one can write them."""

import shlex
import unittest
from pathlib import Path

from torch_testing_ext._process import user_commands
from torch_testing_ext.runner import run_again
from torch_testing_ext.runner.options.sources import read_options


def read(words):
    return read_options(words, {}, Path.cwd(), Path.cwd()).options


class RunAgainTest(unittest.TestCase):
    def test_options_come_back(self):
        for words, field in (
            (["--gpus", "none"], "gpus"),
            (["--gpus", "2"], "gpus"),
            (["--gpus", "0,"], "gpus"),
            (["--gpus", "0,2"], "gpus"),
            (["--timeout", "0.5"], "timeout"),
            (["-o", "leaked=fail"], "leaked"),
            (["-o", "loader=unittest"], "loader"),
            (["-m", "not slow"], "marks"),
        ):
            with self.subTest(words=words):
                options = read(words)
                command = run_again.command(options).removeprefix(user_commands.runner())
                self.assertEqual(getattr(read(shlex.split(command)), field), getattr(options, field))
                self.assertNotEqual(getattr(options, field), getattr(read([]), field))


if __name__ == "__main__":
    unittest.main()

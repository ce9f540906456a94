"""Tests which settings are read from the environment, and that a misspelt one is an error."""

import contextlib
import io
import os
import unittest
from pathlib import Path
from unittest import mock

from kit.processes import clean_environ
from kit.warm import run_warm

from torch_testing_ext._collectives.sanitizer.sanitizer_kinds import SanitizeKind
from torch_testing_ext._machine.device_sharing import RANKS_PER_GPU
from torch_testing_ext._process import setting_names
from torch_testing_ext._tests import notes
from torch_testing_ext.common_utils import run_tests
from torch_testing_ext.launch import rank_variables
from torch_testing_ext.launch.aspects import ASPECTS
from torch_testing_ext.launch.aspects.lanes import LANES
from torch_testing_ext.launch.aspects.output import STREAM
from torch_testing_ext.launch.launch_settings import check_settings, known_names

SETTINGS = {setting.name: setting for aspect in ASPECTS for setting in aspect.all_settings()}


def value_of(name, text):
    """The value of a setting, whose name is without our prefix, with this text; it is a valid one."""
    environ = {setting_names.PREFIX + name: text}
    check_settings(environ)
    return SETTINGS[setting_names.PREFIX + name].value(environ)


class TestSettings(unittest.TestCase):
    def test_known(self):
        table = [
            ("START", "auto", "auto"),
            ("START", "fork", "fork"),
            ("START", "spawn", "spawn"),
            ("LOGS", "/var/log/ranks", Path("/var/log/ranks")),
            ("LOGS", "ranks", Path.cwd() / "ranks"),
            ("LOGS", "~/ranks", Path.home() / "ranks"),
            ("STREAM", "1", True),
            ("STREAM", "0", False),
            ("SHOWLOCALS", "1", True),
            ("DEBUG_RANK", "0", 0),
            ("DEBUG_RANK", "12", 12),
            ("SANITIZE", "nan", frozenset({SanitizeKind.CALLS, SanitizeKind.NAN})),
            ("SANITIZE_ORDER", "fail", True),
            ("DELAYS", "12", 12),
            ("UPDATE_BUDGETS", "1", True),
            ("FAKE_DEVICES", "0,3", ("0", "3")),
            ("FAKE_ACCELERATORS", "4", 4),  # for _machine/fake_accelerator/, as those below
            ("FAKE_MEMORY", "1000000", 1000000),
            ("FAKE_LATE_STREAMS", "1", True),
        ]
        for name, text, value in table:
            with self.subTest(name=name, text=text):
                self.assertEqual(value_of(name, text), value)
        # For _machine/device_sharing.py.
        check_settings({RANKS_PER_GPU: "4"})
        tested = {RANKS_PER_GPU, *(setting_names.PREFIX + name for name, _, _ in table)}
        self.assertEqual(tested, set(known_names()), "a setting is not tested")

    def test_defaults(self):
        for setting in SETTINGS.values():
            with self.subTest(setting.name):
                # An empty value counts as not set.
                self.assertEqual(setting.value({}), setting.value({setting.name: ""}))
        check_settings(dict.fromkeys(known_names(), ""))

    def test_what_the_kit_sets_itself(self):
        self.assertTrue(LANES.value({"_TORCH_TESTING_EXT_LANES": "1"}))
        check_settings({"_TORCH_TESTING_EXT_RANK": "1"})

    def test_an_unknown_name_says_the_nearest(self):
        for name, near in (
            ("TORCH_TESTING_EXT_STRAT", "TORCH_TESTING_EXT_START, "),
            ("TORCH_TESTING_EXT_SANITISE", "TORCH_TESTING_EXT_SANITIZE, "),
            ("TORCH_TESTING_EXT_start", "TORCH_TESTING_EXT_"),
            ("TORCH_TESTING_EXT_", "TORCH_TESTING_EXT_"),
        ):
            with self.subTest(name=name), self.assertRaises(ValueError) as caught:
                check_settings({name: "fork"})
            self.assertRegex(
                str(caught.exception), f"^{name} is not a variable of torch_testing_ext. Did you mean: {near}"
            )

    def test_an_unknown_value_lists_the_known(self):
        table = [
            ("START", ["forks", "FORK", " fork", "1"], "auto, fork, fork-fresh or spawn"),
            ("STREAM", ["yes", "2", "true", "-1", " 1"], "0 or 1"),
            ("RANKS_PER_GPU", ["0", "-1", "many", "1.5"], "a number of ranks: 1, 2, 3 ..."),
            ("FAKE_ACCELERATORS", ["x", "0"], "a number"),
            ("FAKE_MEMORY", ["x", "0", "1.5", "-1"], "a number of bytes"),
            ("FAKE_LATE_STREAMS", ["yes", "2"], "0 or 1"),
            ("DEBUG_RANK", ["-1", "one", "1.0", "0x1", "1,2"], "a rank: 0, 1, 2 ..."),
        ]
        for name, values, known in table:
            for value in values:
                with self.subTest(name=name, value=value), self.assertRaises(ValueError) as caught:
                    check_settings({setting_names.PREFIX + name: value})
                message = f"TORCH_TESTING_EXT_{name}={value!r} is not valid; use {known}"
                self.assertEqual(str(caught.exception), message)
                self.assertIsNone(caught.exception.__cause__)

    def test_digits_of_other_scripts(self):
        """int() accepts them, so they are accepted here."""
        self.assertEqual(value_of("DEBUG_RANK", "\u0663"), 3)
        with self.assertRaisesRegex(ValueError, "DEBUG_RANK='\u00b2' is not valid"):
            check_settings({"TORCH_TESTING_EXT_DEBUG_RANK": "\u00b2"})

    def test_other_variables_are_ignored(self):
        check_settings({"TORCH_TESTING": "1", "MY_TORCH_TESTING_EXT_START": "fork", "PATH": "/bin"})

    def test_the_environment_is_read_each_time(self):
        with mock.patch.dict(os.environ, TORCH_TESTING_EXT_STREAM="1"):
            self.assertTrue(STREAM.value())
        with mock.patch.dict(os.environ, TORCH_TESTING_EXT_STREAM="0"):
            self.assertFalse(STREAM.value())


class DefaultTimeoutTest(unittest.TestCase):
    def test_a_value_that_is_no_number_of_seconds(self):
        for text in ("300", "0.5", ""):
            check_settings({"DISTRIBUTED_TESTS_DEFAULT_TIMEOUT": text})
        for text in ("5m", "-1", "nan"):
            with self.assertRaisesRegex(ValueError, f"DISTRIBUTED_TESTS_DEFAULT_TIMEOUT='{text}' is not valid"):
                check_settings({"DISTRIBUTED_TESTS_DEFAULT_TIMEOUT": text})

    def test_it_is_no_error_of_the_import(self):
        code = "from torch_testing_ext.common_distributed import TIMEOUT_DEFAULT; print(TIMEOUT_DEFAULT)"
        environ = clean_environ(DISTRIBUTED_TESTS_DEFAULT_TIMEOUT="5m")
        done = run_warm("-c", code, cwd=".", env=environ)
        self.assertEqual((done.stdout, done.stderr), ("300\n", ""))


class NetworkTest(unittest.TestCase):
    """gloo does not say what is missing."""

    def warned(self):
        rank_variables._check_network.cache_clear()
        notes.take_notes()
        with contextlib.redirect_stderr(io.StringIO()):
            rank_variables.common_variables(2, 1)
            rank_variables.common_variables(2, 1)
        return [str(warning) for warning in notes.take_notes().warnings]

    def test_no_loopback_interface(self):
        with mock.patch.object(rank_variables.socket, "socket") as made:
            made.return_value.__enter__.return_value.connect.side_effect = OSError(101, "Network is unreachable")
            (warning,) = self.warned()
        self.assertIn("nothing on this machine reaches 127.0.0.1 (Network is unreachable)", warning)

    def test_a_loopback_interface(self):
        self.assertEqual(self.warned(), [])


if __name__ == "__main__":
    run_tests()

"""Tests `@collectives_may_differ`, and what is said where nothing can be compared."""

import contextlib
import io
import unittest
from unittest import mock

from torch_testing_ext._testing.marks.settings_of_tests import may_differ
from torch_testing_ext._torch.groups import flight_recorder
from torch_testing_ext.common_distributed import collectives_may_differ
from torch_testing_ext.common_utils import run_tests
from torch_testing_ext.launch.aspects import sanitizer


@collectives_may_differ("of the class")
class OnPurpose(unittest.TestCase):
    def test_a(self): ...

    @collectives_may_differ("of the test")
    def test_b(self): ...


class ByAccident(unittest.TestCase):
    def test_a(self): ...


class MayDifferTest(unittest.TestCase):
    def test_who_may_differ(self):
        self.assertTrue(may_differ(OnPurpose("test_a")))
        self.assertTrue(may_differ(OnPurpose.test_b))
        self.assertFalse(may_differ(ByAccident("test_a"), ByAccident.test_a, None))

    def test_a_reason_is_needed(self):
        for reason in ("", "  ", None, OnPurpose.test_a):
            with self.assertRaisesRegex(ValueError, "say why"):
                collectives_may_differ(reason)


class NothingRecordedTest(unittest.TestCase):
    def said(self):
        sanitizer.say_if_nothing_is_recorded.cache_clear()
        self.addCleanup(sanitizer.say_if_nothing_is_recorded.cache_clear)
        with contextlib.redirect_stderr(io.StringIO()) as err:
            sanitizer.say_if_nothing_is_recorded()
            sanitizer.say_if_nothing_is_recorded()
        return err.getvalue()

    def test_recorder_without_room(self):
        with mock.patch.dict("os.environ", TORCH_FR_BUFFER_SIZE="0"):
            text = self.said()
        self.assertEqual(text.count("torch records no collectives here"), 1)

    def test_torch_without_recorder(self):
        with mock.patch.object(flight_recorder, "has_flight_recorder", lambda: False):
            self.assertIn("mismatches are not found", self.said())

    def test_this_torch(self):
        with mock.patch.dict("os.environ", TORCH_FR_BUFFER_SIZE="", TORCH_NCCL_TRACE_BUFFER_SIZE=""):
            self.assertEqual(self.said(), "")


if __name__ == "__main__":
    run_tests()

"""@timeout: the time limit of a test."""

from torch_testing_ext._testing.marks.settings_of_tests import timeout_of
from torch_testing_ext.common_distributed import MultiProcessTestCase
from torch_testing_ext.common_utils import TestCase, run_tests, timeout


@timeout(7)
class Timed(MultiProcessTestCase):
    def as_the_class(self):
        pass

    @timeout(0.5)
    def by_itself(self):
        pass


class Untimed(MultiProcessTestCase):
    def silent(self):
        pass


class TestTimeout(TestCase):
    def test_a_timeout_of_a_test_overrides_that_of_its_class(self):
        self.assertEqual(timeout_of(Timed("by_itself")), 0.5)
        self.assertEqual(timeout_of(Timed("as_the_class")), 7.0)
        self.assertIsNone(timeout_of(Untimed("silent")))

    def test_ranks_get_that_time(self):
        self.assertEqual(Timed("by_itself")._timeout(), 0.5)

    def test_invalid_timeouts(self):
        for wrong in (0, -1, True, "5", None):
            with self.assertRaisesRegex(ValueError, "must be a number of seconds greater than 0"):
                timeout(wrong)


if __name__ == "__main__":
    run_tests()

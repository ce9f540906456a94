"""Programs with one slip are told on the first screen, at both levels; sound ones beside them are quiet."""

import unittest

import told_in_a_file_with_a_rather_long_name
import told_uneven
from kit.told import add_tests

from torch_testing_ext.common_utils import run_tests


class UnevenTest(unittest.TestCase):
    """Ranks that differ as they must, and one that differs as it must not."""


class LongTextsTest(unittest.TestCase):
    """On 80 columns."""


add_tests(UnevenTest, told_uneven.PROGRAMS)
add_tests(LongTextsTest, told_in_a_file_with_a_rather_long_name.PROGRAMS)


if __name__ == "__main__":
    run_tests()

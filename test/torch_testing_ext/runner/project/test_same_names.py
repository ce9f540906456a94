"""Tests that only their places tell apart; more of them, and a doctest, where unittest's loader loads the file."""

import doctest
import unittest


def make(number):
    class SizeTest(unittest.TestCase):
        def test_size(self):
            self.assertNotEqual(number, 2)

    return SizeTest


One, Two = make(1), make(2)


def bad_example():
    """
    >>> 1 + 1
    3
    """


def load_tests(loader, tests, pattern):
    tests.addTests(doctest.DocTestSuite())
    tests.addTest(One("test_size"))
    return tests

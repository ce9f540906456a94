"""Tests that only pytest would run, beside one of unittest."""

import unittest


def test_function():
    raise LookupError("it was run")


class TestPlain:
    def test_method(self):
        raise LookupError("it was run")


class CaseTest(unittest.TestCase):
    def test_passes(self):
        pass

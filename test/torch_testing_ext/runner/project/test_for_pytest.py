"""Tests that pytest runs, beside one of unittest."""

import unittest


def test_function(tmp_path):
    assert tmp_path.is_dir()


class TestPlain:
    def test_method(self):
        found = 1
        assert found == 2


class CaseTest(unittest.TestCase):
    def test_passes(self):
        pass

"""Tests of a class that shares something costly, as does the module."""

import time
import unittest

import pytest


def compute(seconds):
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass


@pytest.fixture(scope="module", autouse=True)
def for_the_module():
    compute(0.2)


class SharingTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        compute(0.3)

    @classmethod
    def tearDownClass(cls):
        compute(0.2)

    def test_a(self):
        pass

    def test_b(self):
        pass


def test_c():
    pass

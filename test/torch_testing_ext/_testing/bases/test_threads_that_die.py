"""An exception that ends a thread of a rank, and is not a collective's: a warning, with and without pytest."""

import os
import threading
import unittest
import warnings
from unittest import mock

import pytest
from kit.planted_ranks import Fresh, Persistent, outcome_with_tear_down

from torch_testing_ext.common_utils import run_tests

NAME = "Exception in thread loader: ValueError: bad batch"


def raises(self):
    def load():
        raise ValueError("bad batch")

    if self.rank == 1:
        thread = threading.Thread(target=load, name="loader")
        thread.start()
        thread.join()


class InFresh(Fresh):
    runs = raises


class InPersistent(Persistent):
    runs = raises


class ThreadsThatDieTest(unittest.TestCase):
    def warnings_of(self, case):
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            self.assertEqual(outcome_with_tear_down(case("runs"))[0], "passed")
        return [(one.category, str(one.message).partition("\n")[0]) for one in seen]

    def test_is_a_warning_of_pytest(self):
        with mock.patch.dict(os.environ, {"PYTEST_CURRENT_TEST": "a test"}):
            for case in (InFresh, InPersistent):
                with self.subTest(case.__name__):
                    expected = [(pytest.PytestUnhandledThreadExceptionWarning, NAME)]
                    self.assertEqual(self.warnings_of(case), expected)

    def test_is_a_warning_without_pytest(self):
        with mock.patch.dict(os.environ):
            os.environ.pop("PYTEST_CURRENT_TEST", None)
            for case in (InFresh, InPersistent):
                with self.subTest(case.__name__):
                    self.assertEqual(self.warnings_of(case), [(RuntimeWarning, NAME)])


if __name__ == "__main__":
    run_tests()

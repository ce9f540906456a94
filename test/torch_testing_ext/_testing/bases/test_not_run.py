"""Calls that run nothing, as of `async def`: no base of ranks takes one for a test that has passed."""

import warnings

from hypothesis import strategies as st
from kit.outcomes import outcome_of
from kit.ranks import Ranks

from torch_testing_ext.common_distributed import MultiProcContinuousTest, MultiThreadedTestCase
from torch_testing_ext.common_utils import TestCase, run_tests
from torch_testing_ext.hypothesis_utils import given
from torch_testing_ext.ranks import spawn


async def coroutine(*args):
    raise AssertionError("it runs")


def generator(*args):
    raise AssertionError("it runs")
    yield


async def asynchronous_generator(*args):
    raise AssertionError("it runs")
    yield


class Calls:
    world_size = 2

    async def coroutine(self):
        raise AssertionError("it runs")

    def generator(self):
        raise AssertionError("it runs")
        yield

    async def asynchronous_generator(self):
        raise AssertionError("it runs")
        yield


class InProcesses(Calls, Ranks):
    @given(n=st.integers(0, 3))
    async def drawn(self, n):
        raise AssertionError("it runs")


class InContinuousRanks(Calls, MultiProcContinuousTest):
    @classmethod
    def backend_str(cls):
        return "gloo"


class InThreads(Calls, MultiThreadedTestCase):
    def setUp(self):
        super().setUp()
        self._spawn_threads()


class InOneProcess(TestCase):
    @given(n=st.integers(0, 3))
    async def drawn(self, n):
        raise AssertionError("it runs")


class NotRunTest(TestCase):
    def test_methods(self):
        for cls in (InProcesses, InContinuousRanks, InThreads):
            cls.setUpClass()
            try:
                for name in ("coroutine", "generator", "asynchronous_generator"):
                    with self.subTest(cls=cls.__name__, name=name):
                        seen = outcome_of(cls(name))
                        self.assertEqual(seen.outcome, "error")
                        self.assertIn(f"all 2 ranks raised TypeError: Calls.{name} ran nothing", seen.message)
            finally:
                cls.tearDownClass()
                cls.doClassCleanups()

    def test_functions(self):
        for function in (coroutine, generator, asynchronous_generator):
            with self.subTest(function.__name__), self.assertRaisesRegex(Exception, "ran nothing: it is `async"):
                spawn(function, 2)

    def test_properties(self):
        seen = outcome_of(InProcesses("drawn"))
        self.assertEqual(seen.outcome, "failed")
        self.assertIn("InProcesses.drawn ran nothing", seen.message)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Hypothesis lets Python warn, too
            self.assertEqual(outcome_of(InOneProcess("drawn")).outcome, "error")


if __name__ == "__main__":
    run_tests()

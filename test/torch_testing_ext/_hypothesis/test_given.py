"""`given` with other decorators and bases, in forked and in spawned ranks; and how to reproduce a failure."""

import importlib
import os
import re
import sys
import tempfile
import unittest
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import find, strategies as st
from kit.outcomes import AccountsResult
from kit.processes import ROOT, clean_environ
from kit.ranks import Ranks
from kit.warm import run_warm
from torch.distributed.tensor import Replicate, Shard

from torch_testing_ext._hypothesis.strategies.world_strategies import MeshPlan
from torch_testing_ext._torch.tensors import dtensor_parts
from torch_testing_ext.common_distributed import MultiThreadedTestCase
from torch_testing_ext.common_utils import TestCase, instantiate_parametrized_tests, parametrize, run_tests
from torch_testing_ext.distributed._tensor.common_dtensor import DTensorContinuousTestBase, DTensorTestBase, with_comms
from torch_testing_ext.hypothesis_utils import (
    Phase,
    Verbosity,
    assume,
    device_meshes,
    dtensors,
    example,
    given,
    note,
    per_rank,
    placements,
    reproduce_failure,
    settings,
    target,
)

SUBJECT = Path(__file__).with_name("search_subject.py")
PROFILE = settings(max_examples=20, database=None, derandomize=True)


class TestWithComms(DTensorTestBase):
    @with_comms
    @PROFILE
    @given(case=dtensors(device_meshes(max_dims=1)).flatmap(lambda plan: st.tuples(st.just(plan), st.just(plan.full))))
    def test_with_comms_around_given(self, case):
        tensor, full = case
        self.assertEqual(tensor.full_tensor(), full)

    @with_comms(backend="gloo")
    def test_code_after_a_property_has_a_group(self):
        before = dist.group.WORLD
        self.check()
        self.assertEqual(total(1), 4)
        self.assertIsNot(dist.group.WORLD, before)

    @PROFILE
    @given(n=st.integers(0, 9))
    def check(self, n):
        self.assertEqual(total(self.rank + n), 6 + 4 * n)
        self.assertEqual(self.build_device_mesh().size(), 4)

    @PROFILE
    @given(n=st.integers(0, 9))
    def test_given_without_with_comms(self, n):
        self.assertEqual(total(self.rank + n), 6 + 4 * n)


class TestExamplesOfTheSeed(Ranks):
    """The same seed gives the same examples, whatever else the process has imported."""

    def draw(self):
        drawn = []

        @settings(PROFILE, max_examples=200)
        @given(n=st.integers(), text=st.text())
        def collect(self, n, text):
            drawn.append((n, text))

        collect(self)
        return drawn

    def test_other_modules(self):
        before = self.draw()
        # Hypothesis reads the constants of modules that lie outside of site-packages.
        with tempfile.TemporaryDirectory() as folder:
            module = Path(folder, "many_constants.py")
            module.write_text("".join(f"NUMBER_{n} = {n * 7919}\nTEXT_{n} = 'text {n}'\n" for n in range(300)))
            with mock.patch.object(sys, "path", [folder, *sys.path]), mock.patch.dict(sys.modules):
                importlib.import_module("many_constants")
                after = self.draw()
        self.assertEqual(after, before)


def total(number):
    tensor = torch.tensor([float(number)])
    dist.all_reduce(tensor)
    return tensor.item()


class Subjects:
    """The tests that the tests below run. They are nested so that no test loader collects them."""

    class Failing(Ranks):
        @settings(PROFILE, max_examples=100)
        @given(n=st.integers(0, 1000), mine=per_rank(st.booleans()))
        def test_fails(self, n, mine):
            note(f"rank {self.rank} has {mine}")
            self.assertFalse(n > 100 and mine)

    class Replayed(Failing):
        def run_test(self, name, pipe):
            replayed = reproduce_failure(*os.environ["BLOB"].split(" "))(type(self).test_fails)
            with mock.patch.object(type(self), "test_fails", replayed):
                super().run_test(name, pipe)

    class Everything(Ranks):
        @settings(PROFILE, verbosity=Verbosity.quiet, phases=[Phase.explicit, Phase.generate, Phase.target])
        @example(n=3, mine=True)
        @given(n=st.integers(0, 50), mine=per_rank(st.booleans()))
        def test_passes(self, n, mine):
            assume(n != 7)
            target(float(n), label="n")
            note(f"{mine}")
            self.assertEqual(total(n), 2 * n)

        @settings(PROFILE, max_examples=100)
        @given(n=st.integers(0, 1000), mine=per_rank(st.booleans()))
        def test_fails(self, n, mine):
            dist.barrier()
            self.assertFalse(n > 100 and mine)

        def passes_then_fails(self):
            """Both in one start of ranks, each of which imports torch."""
            self.test_passes()
            self.test_fails()


class NoException(BaseException):
    """As torch's CheckpointException."""


class Raises(Ranks):
    """Raises something that `except Exception` does not catch."""

    @settings(PROFILE, max_examples=100)
    @given(n=st.integers(0, 1000))
    def check(self, n):
        if n > 100 and self.rank == 1:
            raise NoException("out of everything")
        dist.barrier()


class Counts(Ranks):
    """Tells how many examples it has run, and whether the same ones come again."""

    @settings(PROFILE, max_examples=3)
    @given(n=st.integers(0, 1 << 60))
    def check(self, n):
        self.seen = [*getattr(self, "seen", ()), n]

    def counts(self):
        self.check()
        self.assertEqual(str(len(self.seen)), os.environ["EXAMPLES"])
        self.check()
        again = self.seen[len(self.seen) // 2 :] == self.seen[: len(self.seen) // 2]
        self.assertEqual(again, os.environ["SAME"] == "yes")


def failure_of(test):
    result = AccountsResult()
    test.run(result)
    assert not result.errors, result.errors[0][1]
    return result.failures[0][1] if result.failures else None


class Persistent(DTensorContinuousTestBase):
    world_size = 2

    @PROFILE
    @given(n=st.integers())
    def draws(self, n):
        pass


class Threads(MultiThreadedTestCase):
    def setUp(self):
        super().setUp()
        self._spawn_threads()

    @PROFILE
    @given(n=st.integers())
    def draws(self, n):
        pass


class TestOtherBases(TestCase):
    def test_ranks_that_would_draw_examples_of_their_own(self):
        for case, base in ((Persistent, "MultiProcContinuousTest"), (Threads, "MultiThreadedTestCase")):
            with self.subTest(base):
                result = unittest.TestResult()
                unittest.TestSuite([case("draws")]).run(result)  # with the fixtures of the class
                ((_, text),) = result.errors + result.failures
                self.assertIn("@given runs in ranks of MultiProcessTestCase and its subclasses only", text)
                self.assertIn(f"those of {base} would each draw", text)


class TestInOneProcess(TestCase):
    def test_examples(self):
        seen = []

        @PROFILE
        @given(flag=st.booleans())
        def check(flag):
            seen.append(flag)

        check()
        self.assertEqual(set(seen), {False, True})

    def test_placements_in_any_order(self):
        drawn = placements(MeshPlan((2, 3)), 1, strided=True, partial=())
        chosen = find(drawn, lambda chosen: chosen[0] not in (Replicate(), Shard(0)))
        self.assertEqual(chosen, (dtensor_parts.strided_shard(0, 3), Shard(0)))


class TestReproduction(TestCase):
    SMALLEST = "test_fails(n=101, mine={rank 0: False, rank 1: True})"

    def test_decorator_in_the_report_reproduces_the_failure(self):
        report = failure_of(Subjects.Failing("test_fails"))
        self.assertIn(self.SMALLEST, report)
        self.assertIn("rank 1: rank 1 has True", report)
        version, blob = re.search(r"@reproduce_failure\('(.*)', b'(.*)'\)", report).groups()
        with mock.patch.dict(os.environ, BLOB=f"{version} {blob}"):
            reproduced = failure_of(Subjects.Replayed("test_fails"))
        self.assertIn(self.SMALLEST, reproduced)
        self.assertIn("in 1 runs of the test", reproduced)


class TestExamples(TestCase):
    def test_an_exception_of_any_kind_is_a_failure_of_the_example(self):
        report = failure_of(Raises("check"))
        self.assertIn("check(n=101)", report)
        self.assertIn("NoException: out of everything", report)

    def test_number(self):
        with mock.patch.dict(os.environ, EXAMPLES="3", SAME="yes", HYPOTHESIS_PROFILE="default"):
            self.assertIsNone(failure_of(Counts("counts")))

    def test_number_in_a_search(self):
        with mock.patch.dict(os.environ, EXAMPLES="120", SAME="no", HYPOTHESIS_PROFILE="search"):
            self.assertIsNone(failure_of(Counts("counts")))

    @pytest.mark.slow
    def test_options_for_a_search(self):
        pytest_with_plugin = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "torch_testing_ext.pytest_plugin")
        for runner in ((str(SUBJECT),), (*pytest_with_plugin, str(SUBJECT))):
            with self.subTest(runner=runner):
                done = run_warm(*runner, "--hypothesis-profile=search", cwd=ROOT, env=clean_environ())
                self.assertEqual(done.returncode, 0, done.stdout + done.stderr)


@instantiate_parametrized_tests
class TestArguments(DTensorTestBase):
    """Those that are not drawn reach the body in each rank."""

    world_size = 2

    @parametrize("limit", [3, 9])
    @with_comms
    @PROFILE
    @given(n=st.integers(0, 3))
    def test_of_parametrize(self, n, limit):
        self.assertLessEqual(total(n), 2 * limit)
        self.assertIn(limit, (3, 9))


@pytest.mark.slow
class TestSpawned(TestCase):
    def test_passes_and_shrinks(self):
        self.assertIsNone(failure_of(Subjects.Everything("test_passes")))
        with mock.patch.dict(os.environ, TORCH_TESTING_EXT_START="spawn"):
            report = failure_of(Subjects.Everything("passes_then_fails"))
        self.assertIn("test_fails(n=101, mine={rank 0: False, rank 1: True}) fails on", report)


if __name__ == "__main__":
    run_tests()

"""MultiProcContinuousTest: one set of ranks for the tests of a class, and when fresh ranks replace it."""

from __future__ import annotations

import json
import os
import random
import tempfile
import unittest
import warnings
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from continuous_subject import (
    WORLD_SIZE,
    InitFails,
    InitSkips,
    Isolated,
    NoBackend,
    OtherForms,
    Poisoned,
    RankIsKilledAfterwards,
    SetUpFails,
    SharesDevices,
    Things,
)
from kit.outcomes import Seen, outcome_of
from kit.processes import files_not_kept, open_descriptors

from torch_testing_ext import launch
from torch_testing_ext._testing.bases import ranked_test_case
from torch_testing_ext._testing.bases.global_state import GlobalStateWarning
from torch_testing_ext.common_distributed import TEST_SKIPS, MultiProcContinuousTest, RankError
from torch_testing_ext.common_utils import (
    TestCase,
    instantiate_parametrized_tests,
    parametrize,
    run_tests,
    set_rng_seed,
)


class Ran(NamedTuple):
    tests: dict[str, Seen]
    of_class: str  # the error outside of its tests
    told: list[list[Any]]  # by rank
    warnings: list[str]


def run_class(cls: type[MultiProcContinuousTest], *names: str) -> Ran:
    """Run these tests as a suite does, with the set-up and tear-down of the class."""
    outer = unittest.TestResult()
    seen: dict[str, Seen] = {}

    class Suite(unittest.TestSuite):
        def run(self, result: Any, debug: bool = False) -> Any:  # tests one by one, so that each outcome is known
            self._tearDownPreviousClass(None, result)
            cls.setUpClass()
            try:
                for name in names:
                    seen[name] = outcome_of(cls(name))
            finally:
                cls.tearDownClass()
            return result

    of_class = ""
    with (
        tempfile.TemporaryDirectory() as directory,
        mock.patch.dict(os.environ, TELL=directory),
        mock.patch.dict(ranked_test_case.TIMEOUT_OVERRIDE, hangs_in_one=0.5),
        warnings.catch_warnings(record=True) as caught,
    ):
        warnings.simplefilter("always")
        try:
            Suite().run(outer)
        except RankError as error:
            of_class = str(error)
        files = sorted(Path(directory).iterdir())
        told = [[json.loads(line) for line in file.read_text().splitlines()] for file in files]
    texts = [str(warning.message) for warning in caught if warning.category is GlobalStateWarning]
    return Ran(seen, of_class, told, texts)


class TestOutcomes(TestCase):
    @parametrize(
        "name,outcome,message",
        [
            ("passes", "passed", "^$"),
            (
                "fails_in_one",
                "failed",
                r"rank 1 of 3 failed: AssertionError: as told",
            ),
            ("raises_in_two", "error", "ValueError: rank 1(.|\n)*ValueError: rank 2"),
            ("dies", "error", r"rank 1 of 3 was killed by SIGKILL"),
            ("exits", "error", r"rank 1 of 3 exited with code 3 before the test finished"),
            ("leaves_at_once", "error", r"rank 1 of 3 exited with code 0 before the test finished"),
            ("skips", "skipped", "^not today$"),
            ("skips_in_one", "failed", "rank 1 skipped, ranks 0, 2 did not"),
            ("exits_with_a_skip", "skipped", "NCCL"),
            ("needs_devices", "skipped", "at least 1000"),
            ("fails_as_expected", "expected failure", "as expected"),
            ("cleanup_fails", "failed", "in clean-up"),
            ("dies_in_clean_up", "error", "exited with code 3(.|\n)*the test had failed: AssertionError: as told"),
            ("subtest_fails", "failed", r"in subtest \(size=2\): AssertionError: within"),
            (
                "expects_other_text",
                "failed",
                "AssertionError: '0' != '1'(.|\n)*ranks disagree at .*continuous_subject.py",
            ),
        ],
        name_fn=lambda name, outcome, message: name,
    )
    def test_of(self, name: str, outcome: str, message: str) -> None:
        """After any outcome, the next test runs and passes. "prints" comes first, so that all ranks have their group:
        a rank that fails before that may keep the others from connecting."""
        ran = run_class(Things, "prints", name, "passes")
        self.assertEqual(ran.tests[name].outcome, outcome, ran.tests[name].message)
        self.assertRegex(ran.tests[name].message, message)
        self.assertEqual(ran.tests["passes"], ("passed", ""))
        self.assertEqual((ran.of_class, ran.warnings), ("", []))

    def test_a_rank_that_lost_a_peer_is_no_culprit(self) -> None:
        message = run_class(Things, "passes", "fails_in_one").tests["fails_in_one"].message
        self.assertIn("(lost its peer because of rank 1)", message)
        self.assertRegex(message, "To run it alone:\n  python -m unittest .*Things.fails_in_one")

    def test_only_the_tests_own_output_is_shown(self) -> None:
        message = run_class(Things, "prints", "prints_and_fails").tests["prints_and_fails"].message
        said = r"\n\nranks 0-2 printed the same; rank \d's last lines of output:\nthis is prints_and_fails\n\n"
        self.assertRegex(message, said)
        self.assertNotRegex(message, "this is prints\n")

    def test_a_stuck_rank(self) -> None:
        ran = run_class(Things, "prints", "hangs_in_one", "passes")
        message = ran.tests["hangs_in_one"].message
        self.assertRegex(
            message, r": rank 1 never reached .*; ranks 0, 2 are waiting in it; timed out after \d+\.\d s\n"
        )
        self.assertRegex(message, r"rank 1: continuous_subject.py:\d+ in hangs_in_one \(threading.Event\(\).wait\(\)\)")
        self.assertRegex(message, "(?s)rank 1's stacks, most recent call first:.*in hangs_in_one")
        self.assertEqual(ran.tests["passes"], ("passed", ""))

    def test_a_stuck_rank_does_not_delay_the_failure_of_another(self) -> None:
        message = run_class(Things, "passes", "fails_while_another_hangs").tests["fails_while_another_hangs"].message
        self.assertRegex(message, r"rank 2 of 3 failed: .*as told")
        self.assertRegex(message, r"rank 1: still running after \d+\.\d+ s")
        self.assertRegex(message, "(?s)rank 1's stacks, most recent call first:.*in fails_while_another_hangs")


class TestRanks(TestCase):
    def test_the_same_for_all_tests(self) -> None:
        ran = run_class(Things, "tells_pids", "skips", "passes", "needs_devices", "tells_pids")
        pids = []
        for rank, (first, second) in enumerate(ran.told):
            self.assertEqual(first, second)
            self.assertEqual(first[1:], [rank, rank, WORLD_SIZE, WORLD_SIZE])
            pids.append(first[0])
        self.assertEqual(len(set(pids)), WORLD_SIZE)

    @parametrize("between", ["fails_in_one", "dies", "changes_default_dtype"])
    def test_fresh_ranks_after(self, between: str) -> None:
        ran = run_class(Things, "tells_pids", between, "tells_pids")
        for first, second in ran.told:
            self.assertNotEqual(first[0], second[0])

    @pytest.mark.slow
    def test_a_forked_child_takes_no_task(self) -> None:
        ran = run_class(Things, "forks_a_child_that_returns", *["tells_pids"] * 5)
        for pids in ran.told:
            self.assertEqual(pids, pids[:1] * 5)

    def test_isolated(self) -> None:
        ran = run_class(Isolated, "tells_pids", "passes", "tells_pids")
        for first, second in ran.told:
            self.assertNotEqual(first[0], second[0])
            self.assertEqual(first[1:], second[1:])

    def test_no_port_is_kept_for_ranks_that_are_gone(self) -> None:
        run_class(Isolated, "passes")  # now there is a fork server
        before = open_descriptors()
        self.assertEqual(run_class(Isolated, "passes", "passes").tests["passes"].outcome, "passed")
        self.assertEqual(open_descriptors(), before)

    def test_random_numbers(self) -> None:
        """Every test begins with the same seeds, in every rank and after any other test."""
        ran = run_class(Things, "tells_numbers", "changes_seed", "tells_numbers")
        set_rng_seed(1234)
        expected = [torch.rand(2).tolist(), random.random()]
        self.assertEqual(ran.told, [[expected, expected]] * WORLD_SIZE)
        self.assertEqual(ran.warnings, [])

    def test_none_for_tests_that_are_skipped(self) -> None:
        class WithoutRanks(Things):
            @classmethod
            def _spawn_processes(cls, world_size: int) -> None:
                raise AssertionError("ranks were started")

        self.assertEqual(run_class(WithoutRanks, "needs_devices").tests["needs_devices"].outcome, "skipped")

    def test_none_left_after_the_class(self) -> None:
        with files_not_kept():
            run_class(Things, "passes")
            self.assertEqual(Things.processes, [])
            self.assertIsNone(vars(Things)["_kept"])
            self.assertFalse(dist.is_initialized())
            self.assertFalse(os.path.exists(Things.rdvz_file or ""))

    @pytest.mark.slow
    def test_spawned(self) -> None:
        with mock.patch.dict(os.environ, TORCH_TESTING_EXT_START="spawn"):
            ran = run_class(OtherForms, "tells_pids", "fails_as_expected")
            launch.close()  # otherwise the next test would spawn its ranks, too
        self.assertEqual([seen.outcome for seen in ran.tests.values()], ["passed", "expected failure"])
        self.assertEqual(len(ran.told), 2)


class TestState(TestCase):
    @parametrize(
        "what,told",
        [
            ("default_dtype", "0-2: default dtype: torch.float32 -> torch.float64"),
            ("default_device", "0-2: default device: device(type='cpu') -> device(type='meta')"),
            ("deterministic_algorithms", "0, 2: deterministic algorithms: 0 -> 2"),
            ("threads", "0-2: number of threads: "),
            ("gradients", "0-2: gradients enabled: True -> False"),
            ("environment", "0-2: os.environ['LEFT_BEHIND']: not set -> '1'"),
            ("directory", "0-2: working directory: "),
            ("group", "0-2: default process group: a ProcessGroup -> none"),
        ],
        name_fn=lambda what, told: what,
    )
    def test_left_changed(self, what: str, told: str) -> None:
        name = f"changes_{what}"
        ran = run_class(Things, name, "finds_all_as_it_was")
        self.assertEqual([seen.outcome for seen in ran.tests.values()], ["passed", "passed"], ran.tests)
        self.assertIn(f"Things.{name} left global state changed in ranks {told}", "\n".join(ran.warnings))
        self.assertEqual(len(ran.warnings), 4 if what == "environment" else 1, ran.warnings)

    def test_left_changed_by_a_failure(self) -> None:
        ran = run_class(Things, "changes_and_fails", "finds_all_as_it_was")
        self.assertEqual([seen.outcome for seen in ran.tests.values()], ["failed", "passed"])
        self.assertIn("default dtype: torch.float32 -> torch.float64", ran.tests["changes_and_fails"].message)
        self.assertEqual(ran.warnings, [])

    def test_as_an_error(self) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("error", GlobalStateWarning)
            changed, after = (outcome_of(Things(name)) for name in ("changes_default_dtype", "finds_all_as_it_was"))
        Things.tearDownClass()
        self.assertEqual(changed.outcome, "error")
        self.assertRegex(
            changed.message,
            "GlobalStateWarning: Things.changes_default_dtype left global state changed in ranks 0-2",
        )
        self.assertEqual(after, ("passed", ""))


class TestClasses(TestCase):
    def test_a_failed_class_affects_neither_a_subclass_nor_the_next(self) -> None:
        self.assertEqual(run_class(Things, "dies").tests["dies"].outcome, "error")
        for cls in (Isolated, OtherForms, Things):
            self.assertEqual(run_class(cls, "passes").tests["passes"], ("passed", ""))

    @pytest.mark.slow
    def test_a_subclass_while_the_class_has_ranks(self) -> None:
        """Their tests may run in any order."""
        for cls in (Things, Isolated, Things):
            self.assertEqual(outcome_of(cls("passes")), ("passed", ""))
        Isolated.tearDownClass()
        self.assertEqual(outcome_of(Things("passes")), ("passed", ""))
        Things.tearDownClass()

    def test_error_in_making_the_group(self) -> None:
        with mock.patch.object(InitFails, "world_size", 2):
            ran = run_class(InitFails, "passes", "prints")
        for seen in ran.tests.values():
            self.assertRegex(seen.message, r"rank 1 of 2 raised OSError: no group")
            self.assertRegex(seen.message, "rank 1's traceback:\nTraceback(.|\n)*in _init_pg")

    @parametrize("by", [SystemExit(TEST_SKIPS["multi-gpu-4"].exit_code), unittest.SkipTest("not here")])
    def test_skip_in_making_the_group(self, by: BaseException) -> None:
        with mock.patch.object(InitSkips, "by", by):
            launch.close()  # so that the ranks inherit the change
            ran = run_class(InitSkips, "passes", "prints")
        reason = "not here" if isinstance(by, unittest.SkipTest) else "Need at least 4 accelerator devices"
        self.assertEqual(set(ran.tests.values()), {("skipped", reason)})
        self.assertEqual(ran.of_class, "")

    def test_error_in_setting_up_a_test(self) -> None:
        ran = run_class(SetUpFails, "hangs_in_one", "passes")
        self.assertRegex(ran.tests["hangs_in_one"].message, "after the ranks were told")
        self.assertEqual(ran.tests["passes"], ("passed", ""))

    def test_a_rank_that_dies_between_tests(self) -> None:
        """No test of the class has failed; the class has."""
        ran = run_class(RankIsKilledAfterwards, "prints", "passes")
        self.assertEqual([seen.outcome for seen in ran.tests.values()], ["passed", "passed"])
        self.assertRegex(
            ran.of_class, r"rank 1 of 3 was killed by SIGKILL (.|\n)*\(after .*RankIsKilledAfterwards.prints\)"
        )

    def test_a_rank_that_dies_after_the_last_test(self) -> None:
        self.assertRegex(run_class(RankIsKilledAfterwards, "prints").of_class, "rank 1 of 3 was killed by SIGKILL")

    def test_poison_pill(self) -> None:
        self.assertRegex(str(run_class(Poisoned, "passes").tests["passes"]), "skipped.*poison_pill is set")

    def test_other_forms_of_world_size_and_device_type(self) -> None:
        self.assertEqual(len(run_class(OtherForms, "tells_pids").told), 2)

    def test_one_rank_per_device_by_default(self) -> None:
        with mock.patch.object(Things, "world_size", -2):
            self.assertEqual(Things._get_world_size("cpu"), 1)
            with mock.patch.object(torch, "get_device_module") as module:
                module().device_count.return_value = 0
                with self.assertRaisesRegex(unittest.SkipTest, "No cuda devices available"):
                    Things._get_world_size("cuda")

    def test_missing_backend(self) -> None:
        self.assertRegex(str(run_class(NoBackend, "passes").tests["passes"]), "skipped.*is not available")

    @parametrize("backend,told", [("nccl", "1"), ("nccl-lazy", "1"), ("nccl-legacy", None), ("gloo", None)])
    def test_nccl_may_put_several_ranks_on_a_device(self, backend: str, told: Any) -> None:
        with mock.patch.dict(os.environ, BACKEND_OF_SUBJECT=backend):
            ran = run_class(SharesDevices, "tells_the_setting")
        self.assertEqual(ran.told, [[told]] * WORLD_SIZE)

    def test_defaults(self) -> None:
        cls = MultiProcContinuousTest
        self.assertEqual((cls.world_size, cls.rank, cls.MAIN_PROCESS_RANK), (-2, -2, -1))
        self.assertEqual((cls.rdvz_file, cls.poison_pill, cls.isolated), (None, False, False))
        self.assertEqual(cls.timeout.total_seconds(), 120)
        self.assertIsNone(cls.backend_str())
        self.assertIsNone(cls.opts())


for cls in (TestOutcomes, TestRanks, TestState, TestClasses):
    instantiate_parametrized_tests(cls)
del cls

if __name__ == "__main__":
    run_tests()

"""Tests with the mark `world_size` in whole worlds, by pytest and by the runner, which must tell the same."""

import json

import pytest
from kit.files import subject
from kit.pytest_runs import PytestCase, run_pytest
from kit.runs import RunsCase, run_test

from torch_testing_ext.common_utils import run_tests

SUBJECT = subject(__file__, "tests_for_worlds.py")
HANG = "rank 4 left without sending; rank 0 is waiting in recv #1 from rank 4"
NOT_IN_WORLD = "not in a world of 5 ranks: it"
HEADER = "whole world: 5 ranks for each test, without communication"
# By the name of a test: how it ends, and what is said of it.
MODEL = {
    "test_sum": ("passed", ""),
    "test_ring": ("failed", HANG),
    "test_bare": ("skipped", "not judged: compares communicated values at test_w.py:27 in test_bare"),
    "test_expected": ("xfail", ""),
    "test_shared": ("skipped", f"{NOT_IN_WORLD} shares its ranks with the other tests of its module"),
    "test_plain": ("skipped", f"{NOT_IN_WORLD} has no ranks"),
    "PlainTest.test_plain": ("skipped", f"{NOT_IN_WORLD} has no ranks"),
}


class UnderPytestTest(PytestCase):
    @pytest.mark.slow
    def test_each_outcome(self):
        run = run_pytest({"test_w.py": SUBJECT}, "-v", "--simulate", "5")
        self.assertIn(HEADER, run.text)
        self.assertEqual(run.outcomes, {name: outcome for name, (outcome, _) in MODEL.items()})
        for name, (_, said) in MODEL.items():
            self.assertIn(said, run.messages.get(name, ""), name)

    def test_bad_input(self):
        for words, said in (
            (("--simulate", "0"), "'0' is not a whole number of at least 1"),
            (("--simulate", "2", "--fake-accelerators", "2"), "--simulate and --fake-accelerators cannot be combined"),
        ):
            run = run_pytest({"test_w.py": ""}, *words)
            self.assertEqual(run.code, 4)
            self.assertIn(said, run.errors)


@pytest.mark.slow
class UnderTheRunnerTest(RunsCase):
    def test_each_outcome(self):
        self.write("test/test_w.py", SUBJECT)
        run = run_test(self.root, "--simulate", "5", "--results", "results.json", "--perfetto", "trace.json")
        self.assertEqual(run.code, 1, run.complaints)
        self.assertEqual(run.console.splitlines()[1], HEADER)
        ends = {}
        for test in json.loads(run.report("results.json"))["tests"]:
            name = test["id"].partition("::")[2].replace("::", ".")
            (attempt,) = test["attempts"]
            ends[name] = test["outcome"], attempt["message"], [world["size"] for world in attempt["worlds"]]
        outcomes = {"failed": "error", "xfail": "expected failure"}
        for name, (outcome, said) in MODEL.items():
            seen, message, sizes = ends[name]
            self.assertEqual(seen, outcomes.get(outcome, outcome), name)
            self.assertIn(said, message)
            self.assertEqual(sizes, [5] if name in ("test_sum", "test_ring", "test_bare") else [], name)
        names = [event.get("args", {}).get("name", "") for event in json.loads(run.report("trace.json"))["traceEvents"]]
        self.assertIn("whole world of 5 ranks, 1 ms for each call, not its time: test_ring", names)
        self.assertIn("rank 4", names)


if __name__ == "__main__":
    run_tests()

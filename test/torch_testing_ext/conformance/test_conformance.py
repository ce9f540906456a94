"""Our bases give the corpus of conformance the outcomes that PyTorch's gave it when they were recorded."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import unittest
from typing import Any

import comparing
import pytest
import worker
from kit.processes import ROOT

from torch_testing_ext.common_utils import instantiate_parametrized_tests, parametrize, run_tests, subtest

FEWEST_TESTS = 300
ALLOWED = comparing.Allowed("a rank other than 0 crashes", "error")


def seen(outcome: str, notes: dict[str, list[str]] | None = None, **more: Any) -> dict[str, Any]:
    return {"reports": [{"outcome": outcome, **more}], "notes": notes or {}}


class ConformanceTest(unittest.TestCase):
    @pytest.mark.slow
    def test_ours_against_recorded_outcomes(self) -> None:
        done = subprocess.run(
            [sys.executable, ROOT / "benchmarks" / "conformance.py", "--recorded"],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
        )
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        count = re.search(r"^(\d+) tests, \d+ stricter as documented, 0 differences$", done.stdout, re.M)
        self.assertIsNotNone(count, done.stdout)
        self.assertGreaterEqual(int(count[1]), FEWEST_TESTS)

    def test_an_unknown_file(self) -> None:
        command = [sys.executable, ROOT / "benchmarks" / "conformance.py", "--recorded", "no_such_file"]
        done = subprocess.run(command, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True)
        self.assertEqual(done.returncode, 2)
        self.assertIn("the corpus has no no_such_file", done.stderr)


ERROR = {"types": ["RankError", "RuntimeError", "AssertionError"], "text": "rank 0\nValueError: text\n"}


@instantiate_parametrized_tests
class ComparingTest(unittest.TestCase):
    @parametrize(
        "theirs,ours",
        [
            subtest((seen("passed"), seen("passed")), name="passed"),
            subtest((seen("skipped", reason="a"), seen("skipped", reason="a")), name="same_reason"),
            subtest((seen("skipped", reason="<generic>"), seen("skipped", reason="own")), name="reason_of_ranks"),
            subtest((seen("error", type="RuntimeError"), seen("failed", **ERROR)), name="failed_or_error"),
            subtest(
                (seen("error", type="RuntimeError", says=["ValueError: text"]), seen("error", **ERROR)),
                name="same_message",
            ),
            subtest((seen("passed", {"0": ["a"]}), seen("passed", {"0": ["a"]})), name="same_notes"),
        ],
    )
    def test_alike(self, theirs: Any, ours: Any) -> None:
        self.assertEqual(comparing.judge(theirs, ours, None), [])

    @parametrize(
        "theirs,ours,says",
        [
            subtest((seen("failed", type="AssertionError"), seen("passed"), "outcome"), name="vacuous_green"),
            subtest((seen("passed"), seen("skipped", reason="a"), "outcome"), name="skipped_here"),
            subtest((seen("skipped", reason="a"), seen("skipped", reason="b"), "reason"), name="reason"),
            subtest((seen("error", type="KeyError"), seen("error", **ERROR), "type"), name="type"),
            subtest(
                (seen("error", type="RuntimeError", says=["KeyError: b"]), seen("error", **ERROR), "message"),
                name="message",
            ),
            subtest((seen("passed", {"0": ["a"]}), seen("passed"), "notes of 0"), name="notes"),
            subtest((seen("passed", {"0": ["a", "b"]}), seen("passed", {"0": ["b", "a"]}), "notes"), name="order"),
            subtest((seen("passed"), {"reports": [], "notes": {}}, "outcome"), name="not_run"),
            subtest((None, seen("passed"), "only ours"), name="unknown_there"),
            subtest((seen("passed"), None, "only PyTorch"), name="lost_here"),
        ],
    )
    def test_differs(self, theirs: Any, ours: Any, says: str) -> None:
        found = comparing.judge(theirs, ours, None)
        self.assertEqual(len(found), 1, found)
        self.assertIn(says, found[0])

    def test_allowed(self) -> None:
        self.assertEqual(comparing.judge(seen("passed"), seen("error", **ERROR), ALLOWED), [])

    def test_allowed_but_another_outcome(self) -> None:
        found = comparing.judge(seen("passed"), seen("skipped", reason="a"), ALLOWED)
        self.assertIn("ours is skipped, not error as allowed", found[0])

    def test_allowed_but_does_not_occur(self) -> None:
        found = comparing.judge(seen("passed"), seen("passed"), ALLOWED)
        self.assertIn("the allowed difference does not occur", found[0])

    def test_what_is_recorded_has_no_traceback(self) -> None:
        ran = {**seen("error", **ERROR, says=["ValueError: text"]), "notes": {"0": ["a"]}}
        kept = {"outcome": "error", "says": ["ValueError: text"], "type": "RankError"}
        self.assertEqual(comparing.recorded(ran), {"reports": [kept], "notes": {"0": ["a"]}})

    def test_reasons_of_the_kits(self) -> None:
        for reason in ("Need at least 2 CUDA devices", "Need at least 2 accelerator devices"):
            self.assertEqual(worker.named_reason(reason), "<multi-gpu-2>")
        self.assertEqual(worker.named_reason("of the test"), "of the test")

    def test_last_lines_of_tracebacks(self) -> None:
        text = 'Process 0:\nTraceback:\n  File "x"\n    raise E\nmodule.OwnError: text\nValueError\nnot Error: this'
        self.assertEqual(worker.EXCEPTION_LINE.findall(text), ["OwnError: text", "ValueError"])


if __name__ == "__main__":
    run_tests()

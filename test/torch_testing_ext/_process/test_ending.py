"""Tests how processes are ended: by themselves, by SIGTERM, by SIGKILL."""

import signal
import subprocess
import sys
import unittest

from torch_testing_ext._process import ends
from torch_testing_ext.common_utils import run_tests

LONG = 60.0
IGNORES = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)"


class TestEscalation(unittest.TestCase):
    def sent(self, *ended):
        """The signals that processes get which are seen to have ended, or not, and how long they are waited for."""
        answers, waited, signals = iter(ended), [], []

        def have_ended(seconds):
            waited.append(seconds)
            return next(answers)

        ends.escalate(have_ended, signals.append, by_itself=2.0, after_sigterm=0.5)
        return signals, waited

    def test_each_step_only_if_the_one_before_was_not_enough(self):
        self.assertEqual(self.sent(True), ([], [2.0]))
        self.assertEqual(self.sent(False, True), ([signal.SIGTERM], [2.0, 0.5]))
        self.assertEqual(self.sent(False, False), ([signal.SIGTERM, signal.SIGKILL], [2.0, 0.5]))


class TestEnd(unittest.TestCase):
    def end(self, code, **times):
        process = subprocess.Popen(
            [sys.executable, "-c", f"{code}\nprint(flush=True)\ninput()"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        with process:
            process.stdout.readline()
            return ends.end(process, **times)

    def test_by_sigterm(self):
        self.assertEqual(self.end("", after_sigterm=LONG), -signal.SIGTERM)

    def test_by_sigkill(self):
        self.assertEqual(self.end(IGNORES, after_sigterm=0.0), -signal.SIGKILL)

    def test_by_itself(self):
        with subprocess.Popen([sys.executable, "-c", "raise SystemExit(3)"]) as process:
            self.assertEqual(ends.end(process, by_itself=LONG, after_sigterm=0.0), 3)

    def test_one_that_has_ended(self):
        with subprocess.Popen([sys.executable, "-c", ""]) as process:
            process.wait()
            self.assertEqual(ends.end(process, after_sigterm=0.0), 0)


if __name__ == "__main__":
    run_tests()

"""Several runs of the real run_test.py: data that one leaves for the next, shards, and leases as tests see them."""

import json
import os
import signal
import unittest

import pytest
from kit.files import subject
from kit.processes import heed_ctrl_c
from kit.runs import RunsCase
from kit.with_accelerators import environ_of_accelerators

HANDLERS = subject(__file__, "signal_handlers.py")
MIXED = """
import unittest

class {name}(unittest.TestCase):
    def test_good(self): pass
    def test_good_too(self): pass
    def test_bad(self): self.fail()
    @unittest.skip("so")
    def test_skipped(self): pass
"""
LEASED = subject(__file__, "leased_devices.py")


class CommandLineCase(RunsCase):
    def ran(self, *argv):
        """The tests for which a run has results."""
        self.finish(self.start("--results", "results.json", *argv), 0, 1)
        return [test["id"] for test in json.loads((self.root / "results.json").read_text())["tests"]]


@pytest.mark.slow
class RunAfterRunTest(CommandLineCase):
    BAD = ("test/distributed/test_a.py::ATest::test_bad", "test/distributed/test_b.py::BTest::test_bad")

    def write_both(self, a=MIXED, b=MIXED):
        self.write("test/distributed/test_a.py", a.format(name="ATest"))
        self.write("test/distributed/test_b.py", b.format(name="BTest"))

    def remembered(self, name):
        return json.loads((self.root / ".torch_testing_ext" / f"{name}.json").read_text())["tests"]

    def test_show_of_an_earlier_run(self):
        for said, options in (("the first", ("-ojournal=old.jsonl",)), ("the second", ())):
            self.write_both(a=MIXED.replace("self.fail()", f"self.fail('{said}')"))
            self.finish(self.start("test_a", *options), 1)
        self.assertIn("the second", self.finish(self.start("show"), 0))
        shown = self.finish(self.start("show", "--journal=old.jsonl"), 0)
        self.assertIn("the first", shown)
        self.assertNotIn("the second", shown)
        self.finish(self.start("show", "--journal=none.jsonl"), 4)
        self.assertIn("none.jsonl", self.stderr)

    def test_two_runs_at_once_and_the_runs_after_them(self):
        self.write_both()
        for run in [self.start("test_a"), self.start("test_b")]:
            self.finish(run, 1)
        recorded = self.remembered("durations")
        self.assertEqual(len(recorded), 4)
        self.assertTrue(all("test_good" in test for test in recorded), recorded)
        self.assertEqual(tuple(self.remembered("failed")), self.BAD)

        # a shard does not change the split for the next one
        first = self.ran("--shard", "1/2")
        second = self.ran("--shard", "2/2")
        self.assertTrue(first and second)
        self.assertEqual((len(first) + len(second), len({*first, *second})), (8, 8))
        self.assertEqual(self.remembered("durations"), recorded)

        # a test that passes again is no longer a failure
        self.write_both(a=MIXED.replace("self.fail()", "pass"))
        self.assertCountEqual(self.ran("--last-failed"), self.BAD)
        self.assertEqual(tuple(self.remembered("failed")), self.BAD[1:])


def setUpModule():
    heed_ctrl_c()


class InterruptedTest(CommandLineCase):
    def test_before_the_first_test(self):
        self.write("test/distributed/test_hangs.py", "import time\nopen('imported', 'w').close()\ntime.sleep(600)\n")
        os.mkfifo(self.root / "imported")
        for number in (signal.SIGINT, signal.SIGTERM):
            with self.subTest(signal=number):
                run = self.start()
                (self.root / "imported").read_bytes()
                run.send_signal(number)
                out = self.finish(run, 2)
                self.assertEqual(out.splitlines()[-1], "0 passed, 0 failed, 0 skipped")

    @pytest.mark.slow
    def test_ctrl_c_is_ignored_in_the_background(self):
        """As nohup and shells start programs. The tests are not affected: they have the usual handlers."""
        self.write("test/distributed/test_handlers.py", HANDLERS)
        for name in ("running", "sent"):
            os.mkfifo(self.root / name)
        ignored = (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
        before = {number: signal.signal(number, signal.SIG_IGN) for number in ignored}
        run = self.start(cold=True)
        for number, handler in before.items():
            signal.signal(number, handler)
        (self.root / "running").read_bytes()
        run.send_signal(signal.SIGINT)
        (self.root / "sent").write_bytes(b"")
        out = self.finish(run, 0)
        self.assertEqual(out.splitlines()[-1], "3 passed, 0 failed, 0 skipped")


class DevicesTest(CommandLineCase):
    def test_leases(self):
        self.write("test/distributed/test_leased.py", LEASED)
        out = self.finish(self.start(environ=environ_of_accelerators(3)), 0)
        self.assertEqual(out.splitlines()[-1], "10 passed, 0 failed, 1 skipped")
        self.assertIn("needs 4 devices, 3 available", out)

    @pytest.mark.slow
    def test_ranks_that_say_nothing_of_devices(self):
        """They have one each, unless the run says otherwise: by an option, which the processes of tests follow."""
        source = "import os, pytest\n@pytest.mark.world_size(1)\n"
        source += "def test_it(ranks): assert ranks.devices == int(os.environ['EXPECTED'])\n"
        self.write("test/distributed/test_it.py", source)
        for option, expected in (("-odevices=auto", "1"), ("-odevices=cpu", "0")):
            with self.subTest(option):
                environ = environ_of_accelerators(1, EXPECTED=expected)
                self.finish(self.start(option, environ=environ), 0)


if __name__ == "__main__":
    unittest.main()

"""Class and module fixtures that hang, exit or die: none of them passes in silence."""

import textwrap

import pytest
from kit.files import subject
from kit.project import Project

from torch_testing_ext.common_utils import TestCase, run_tests

# Before, pytest drops what cleanups of a class raise.
CLEANUPS_ARE_HEEDED = pytest.version_tuple >= (8, 2)


def setUpModule():
    global PROJECT
    PROJECT = Project()


def tearDownModule():
    PROJECT.close()


def run_source(source, **options):
    return PROJECT.run(PROJECT.write("import os, signal, sys, time, unittest\n" + textwrap.dedent(source)), **options)


class TestTearDowns(TestCase):
    """The last test before it fails."""

    def check(self, ran, test, outcome, *parts):
        self.assertEqual(ran.outcomes[test], outcome, ran[test].said)
        title = ran[test].said.partition("\n")[0]
        for part in parts:
            self.assertIn(part, title)

    def test_a_class(self):
        ran = run_source(subject(__file__, "class_ends.py"))
        self.assertEqual((ran.outcomes["test_a1"], ran.outcomes["test_g"]), ("passed", "passed"))
        self.check(ran, "test_a2", "crashed", "exited with code 0")
        self.check(ran, "test_b", "error", "tearDownClass (test_1.Leaves): SystemExit: 0")
        self.check(ran, "test_c", "error", "KeyboardInterrupt")
        self.check(ran, "test_d", "crashed", "was killed by SIGKILL")
        self.check(ran, "test_e", "crashed", "exited with code 0")
        self.check(ran, "test_f", "crashed", "exited with code 0")
        self.assertIn("the last words of the class", ran["test_a2"].output)

    def test_one_that_hangs(self):
        ran = run_source(
            subject(__file__, "hanging_class_ends.py"),
            timeout=1.5,
        )
        self.assertEqual(ran.outcomes["test_a"], "passed")
        self.check(ran, "test_b", "timeout", "timed out after ")
        self.check(ran, "test_c", "timeout", "timed out after ")
        self.assertIn("in wait", ran["test_b"].said)

    def test_a_module(self):
        for body, outcome, parts in (
            ("os._exit(0)", "crashed", ("exited with code 0",)),
            ("sys.exit(0)", "error", ("SystemExit: 0",)),
            ("time.sleep(600)", "timeout", ("timed out after",)),
        ):
            with self.subTest(body=body):
                ran = run_source(
                    f"""
                    def tearDownModule(): {body}
                    class One(unittest.TestCase):
                        def test_a(self): pass
                    class Two(unittest.TestCase):
                        def test_b(self): pass
                    """,
                    timeout=1.5,
                )
                self.assertEqual(ran.outcomes["test_a"], "passed")
                self.check(ran, "test_b", outcome, *parts)

    def test_a_class_before_others_in_a_module(self):
        """The others run, in another process if necessary."""
        for body, outcome in (("os._exit(0)", "crashed"), ("time.sleep(600)", "timeout"), ("sys.exit(0)", "error")):
            with self.subTest(body=body):
                ran = run_source(
                    f"""
                    def setUpModule(): pass
                    class One(unittest.TestCase):
                        @classmethod
                        def tearDownClass(cls): {body}
                        def test_a(self): pass
                    class Two(unittest.TestCase):
                        def test_b(self): pass
                        def test_c(self): pass
                    """,
                    timeout=1.5,
                )
                self.check(ran, "test_a", outcome)
                self.assertEqual((ran.outcomes["test_b"], ran.outcomes["test_c"]), ("passed", "passed"))

    def test_a_failing_test_keeps_its_outcome(self):
        ran = run_source(
            """
            class T(unittest.TestCase):
                @classmethod
                def tearDownClass(cls): os._exit(0)
                def test_a(self): self.fail("for a reason of its own")
            """
        )
        self.assertEqual(ran.outcomes, {"test_a": "failed"})
        self.assertIn("for a reason of its own", ran["test_a"].said)
        self.assertIn("after the test: ", ran["test_a"].said)

    def test_persistent_ranks(self):
        """A subclass may forget super(); a rank may hang or die when its tests are over."""
        ran = run_source(subject(__file__, "ends_of_persistent_ranks.py"))
        self.check(ran, "test_a", "crashed")
        self.check(ran, "test_b", "error", "still running")
        self.assertIn("rank 1: still running", ran["test_b"].said)
        self.assertIn("in <lambda>", ran["test_b"].said)
        # It forgets super(), so that only a cleanup of the class is left.
        if CLEANUPS_ARE_HEEDED:
            self.check(ran, "test_c", "error", "rank 1 of 2 exited with code 0")


class TestSetUps(TestCase):
    def test_one_that_hangs(self):
        """It is told once, with the time that it took; the other tests of the class are not run."""
        ran = run_source(
            subject(__file__, "hanging_class_starts.py"),
            timeout=1.5,
        )
        self.assertEqual(ran.outcomes, {"test_a": "timeout", "test_b": "error", "test_c": "error", "test_d": "passed"})
        self.assertRegex(ran["test_a"].said, r"^setUpClass \(\w+\.T\) timed out after (1\.[5-9]|[2-9]|\d\d)")
        self.assertIn("in wait", ran["test_a"].said)
        self.assertGreater(ran["test_a"].seconds, 0.4)
        for test in ("test_b", "test_c"):
            self.assertRegex(ran[test].said, r"^not run: setUpClass \(\w+\.T\) timed out after .*\(see T\.test_a\)$")

    def test_a_module_that_hangs(self):
        ran = run_source(
            """
            def setUpModule(): time.sleep(600)
            class One(unittest.TestCase):
                def test_a(self): pass
            class Two(unittest.TestCase):
                def test_b(self): pass
            """,
            timeout=1.5,
        )
        self.assertEqual(ran.outcomes, {"test_a": "timeout", "test_b": "error"})
        self.assertIn("setUpModule", ran["test_a"].said)
        self.assertIn("not run: setUpModule", ran["test_b"].said)

    def test_a_retry_runs_all_that_were_prevented(self):
        mark = PROJECT.root / "hung_once"
        ran = run_source(
            f"""
            class T(unittest.TestCase):
                @classmethod
                def setUpClass(cls):
                    if not os.path.exists({str(mark)!r}):
                        open({str(mark)!r}, "w").close()
                        time.sleep(600)
                def test_a(self): pass
                def test_b(self): self.fail()
            """,
            timeout=1.0,
            retries=1,
        )
        self.assertEqual(ran.outcomes, {"test_a": "flaky", "test_b": "failed"})

    def test_one_that_exits(self):
        ran = run_source(
            """
            class T(unittest.TestCase):
                @classmethod
                def setUpClass(cls): sys.exit(0)
                def test_a(self): pass
                def test_b(self): pass
            """
        )
        self.assertEqual(ran.outcomes, {"test_a": "error", "test_b": "error"})
        self.assertIn("SystemExit: 0", ran["test_a"].said)

    def test_the_set_up_of_another_class_does_not_explain_a_test(self):
        """One class skips, the next fails: unittest runs neither."""
        ran = run_source(subject(__file__, "starts_of_three_classes.py"))
        cleaned = "error" if CLEANUPS_ARE_HEEDED else "skipped"
        self.assertEqual(ran.outcomes, {"test_a": "skipped", "test_b": "error", "test_c": cleaned})
        self.assertIn("broken", ran["test_b"].said)
        self.assertIn("IndexError" if CLEANUPS_ARE_HEEDED else "not here", ran["test_c"].said)

    def test_a_class_that_is_not_set_up_does_not_explain_a_test(self):
        """unittest does not call setUpClass where setUpModule has skipped or failed."""
        for raised, outcome in ("unittest.SkipTest('not here')", "skipped"), ("ValueError('not here')", "error"):
            ran = run_source(
                f"""
                def setUpModule(): raise {raised}
                class One(unittest.TestCase):
                    @classmethod
                    def setUpClass(cls): pass
                    def test_a(self): pass
                class Two(unittest.TestCase):
                    @classmethod
                    def setUpClass(cls): pass
                    def test_b(self): pass
                """
            )
            self.assertEqual(ran.outcomes, {"test_a": outcome, "test_b": outcome})
            for test in "test_a", "test_b":
                self.assertIn("not here", ran[test].said)


class TestWorkers(TestCase):
    """What a test does to its process."""

    def test_one_that_closes_all_descriptors_says_so(self):
        ran = run_source(
            """
            class T(unittest.TestCase):
                def test_passes(self): os.closerange(0, 4096)
                def test_fails(self):
                    os.closerange(3, 4096)
                    self.fail("for a reason of its own")
                def test_opens_others(self):
                    os.closerange(3, 4096)
                    self.files = [open(os.devnull, "w") for _ in range(20)]
            """
        )
        for test in ("test_passes", "test_fails", "test_opens_others"):
            self.assertEqual(ran.outcomes[test], "error")
            self.assertIn("the test closed file descriptors of its process", ran[test].said.partition("\n")[0])
        self.assertIn("for a reason of its own", ran["test_fails"].said)

    def test_a_spoilt_process_reports_how_its_test_ended(self):
        with PROJECT.beside(PROJECT, by_pytest=False) as of_unittest:
            for project in (PROJECT, of_unittest):
                ran = project.run(project.write(subject(__file__, "spoils_its_process.py")))
                self.assertGreaterEqual(len(ran.outcomes), 18)
                for test, outcome in ran.outcomes.items():
                    fails = test.startswith("test_fails_")
                    self.assertEqual(outcome, "failed" if fails else "passed", f"{test}: {ran[test].said}")
                    if fails:
                        self.assertIn("for a reason of its own", ran[test].said.partition("\n")[0])

    def test_broken_streams_are_no_failure(self):
        ran = run_source(subject(__file__, "broken_streams.py"))
        self.assertEqual(ran.outcomes.pop("test_fails_too"), "failed")
        self.assertIn("for a reason of its own", ran["test_fails_too"].said)
        self.assertEqual(set(ran.outcomes.values()), {"passed"}, ran.outcomes)

    def test_a_child_that_runs_on_cannot_report(self):
        """A test that forks: its child returns from the test, too, and would report a pass."""
        ran = run_source(
            """
            class T(unittest.TestCase):
                def test_a(self):
                    self.child = os.fork() == 0
                    if not self.child: self.fail("only in the test's own process")
                def tearDown(self):
                    if not self.child: os.wait()
            """
        )
        self.assertEqual(ran.outcomes, {"test_a": "failed"})


if __name__ == "__main__":
    run_tests()

"""Tests verdicts as tables: one outcome and one message from how every rank ended. No process, no clock."""

import itertools
import signal
import sys
import tempfile
import textwrap
import unittest
from dataclasses import replace
from pathlib import Path

from kit.verdicts import (
    ABORTS,
    ANY_CODE,
    CASE,
    ONE_OF_EACH,
    VerdictTestCase,
    but,
    exited,
    failed,
    killed,
    lost,
    passed,
    raised,
    skipped,
    stopped,
    victim,
    world,
)

from torch_testing_ext._collectives.findings.finding import Doing, Finding, FindingKind
from torch_testing_ext._process.code_sites import Site
from torch_testing_ext._tests.outcomes import TestOutcome
from torch_testing_ext.common_utils import run_tests
from torch_testing_ext.launch import Case, Cause, Expected, RankAccount, RankEnding, Verdict
from torch_testing_ext.launch.failure_views import view_of_error
from torch_testing_ext.launch.judging import judge
from torch_testing_ext.launch.rank_reports import is_victim


class TestOutcomes(VerdictTestCase):
    def test_a_single_rank(self):
        table = {
            RankEnding.PASSED: TestOutcome.PASSED,
            RankEnding.SKIPPED: TestOutcome.SKIPPED,
            RankEnding.FAILED: TestOutcome.FAILED,
            RankEnding.ERROR: TestOutcome.ERROR,
            RankEnding.EXITED: TestOutcome.CRASHED,
            RankEnding.KILLED: TestOutcome.CRASHED,
            RankEnding.LOST: TestOutcome.ERROR,
        }
        for report in ONE_OF_EACH:
            if report.ending is not RankEnding.STOPPED:
                with self.subTest(ending=report.ending, code=report.code):
                    self.assertIs(self.judge(report).outcome, table[report.ending])

    def test_every_rank_counts(self):
        """One bad rank among good ones decides, wherever it stands."""
        table = [
            (failed(), TestOutcome.FAILED, "failed: AssertionError: 1 != 2"),
            (raised(), TestOutcome.ERROR, "raised ValueError: broken"),
            (victim(), TestOutcome.ERROR, "raised RuntimeError: Connection closed"),
            (exited(0), TestOutcome.CRASHED, "exited with code 0 before the test finished"),
            (exited(3), TestOutcome.CRASHED, "exited with code 3 before the test finished"),
            (exited(10), TestOutcome.CRASHED, "exited with code 10"),
            (
                killed(signal.SIGKILL, 0.8),
                TestOutcome.CRASHED,
                "was killed by SIGKILL (out of memory?)",
            ),
            (killed(signal.SIGSEGV), TestOutcome.CRASHED, "was killed by SIGSEGV"),
            (killed(signal.SIGABRT), TestOutcome.CRASHED, "was killed by SIGABRT"),
            (killed(63), TestOutcome.CRASHED, "was killed by signal 63"),
            (lost(), TestOutcome.ERROR, "was lost: the process that starts the ranks"),
        ]
        for bad, outcome, title in table:
            for place in range(3):
                with self.subTest(ending=bad.ending, code=bad.code, place=place):
                    reports = [passed(), passed(), passed()]
                    reports[place] = bad
                    verdict = self.judge(*reports)
                    self.assertVerdict(verdict, outcome, place)
                    self.assertTrue(verdict.message.startswith(f"rank {place} of 3 {title}"), verdict.message)

    def test_only_sigkill_hints_at_memory(self):
        self.assertNotIn("memory", self.judge(killed(signal.SIGSEGV), passed()).message)

    def test_all_skip(self):
        verdict = self.judge(skipped("Need at least 4 devices"), skipped("Need at least 4 devices"))
        self.assertEqual(verdict, Verdict(TestOutcome.SKIPPED, "Need at least 4 devices", code=86))

    def test_all_pass(self):
        self.assertEqual(self.judge(passed(), passed()), Verdict(TestOutcome.PASSED))

    def test_some_skip(self):
        for skips in ((0,), (1,), (0, 2), (1, 2)):
            with self.subTest(skips=skips):
                verdict = self.judge(*(skipped() if rank in skips else passed() for rank in range(3)))
                every = [f"rank {rank}: {'skipped' if rank in skips else 'passed'} after" for rank in range(3)]
                self.assertVerdict(verdict, TestOutcome.FAILED, skips[0], "rank")
                for line in every:
                    self.assertIn(line, verdict.message)
        self.assertInOrder(self.judge(passed(), skipped()).message, "rank 1 skipped, rank 0 did not")
        self.assertInOrder(
            self.judge(skipped(), passed(), skipped(), passed()).message, "ranks 0, 2 skipped, ranks 1, 3 did not"
        )

    def test_a_skip_hides_no_failure(self):
        for bad in ONE_OF_EACH:
            if bad.ending in (RankEnding.PASSED, RankEnding.SKIPPED, RankEnding.STOPPED):
                continue
            for reports, culprit in (((skipped(), bad), 1), ((bad, skipped()), 0)):
                with self.subTest(ending=bad.ending, culprit=culprit):
                    verdict = self.judge(*reports)
                    self.assertNotIn(verdict.outcome, (TestOutcome.PASSED, TestOutcome.SKIPPED))
                    self.assertEqual(verdict.culprit, culprit)
                    self.assertIn(f"rank {1 - culprit}: skipped after 0.10 s: no luck", verdict.message)

    def test_a_skip_that_the_others_wait_for(self):
        verdict = self.judge(skipped(), stopped())
        self.assertVerdict(verdict, TestOutcome.FAILED, 0, "rank 0 skipped, rank 1 did not")
        self.assertInOrder(verdict.message, "rank 1: still running after 1.50 s, terminated")

    def test_a_rank_that_was_ended_never_makes_a_pass(self):
        for expected in (Expected(), ANY_CODE, Expected(code=0)):
            for others in ((passed(),), (skipped(),), (exited(3),), (killed(signal.SIGABRT),)):
                with self.subTest(expected=expected, others=[other.ending for other in others]):
                    verdict = self.judge(*others, stopped(), expected=expected)
                    self.assertNotIn(verdict.outcome, (TestOutcome.PASSED, TestOutcome.SKIPPED))

    def test_timeout(self):
        verdict = self.judge(stopped(30.0), passed(), stopped(30.1), timed_out=True)
        self.assertVerdict(verdict, TestOutcome.TIMEOUT, 0, "timed out after 30.1 s; ranks 0, 2 of 3 still running")
        self.assertInOrder(verdict.message, "rank 1: passed after 1.00 s", "where the running ranks are:")

    def test_timeout_of_one_rank(self):
        verdict = self.judge(passed(), stopped(30.0), timed_out=True)
        self.assertVerdict(verdict, TestOutcome.TIMEOUT, 1, "rank 1 of 2 still running", "rank 0: passed")

    def test_timeout_shows_earlier_failures_too(self):
        verdict = self.judge(stopped(30.0), raised(seconds=29.5), timed_out=True)
        self.assertVerdict(
            verdict, TestOutcome.TIMEOUT, 0, "timed out", "rank 1's traceback:\nTraceback:\nValueError: broken"
        )

    def test_timeout_after_which_all_ranks_ended(self):
        """Our own signals may have woken them, so they have not passed. But an error counts more than the time-out."""
        for reports in ((passed(30.0), passed(30.2)), (skipped(), passed(30.2))):
            for expected in (None, ANY_CODE):
                verdict = self.judge(*reports, timed_out=True, expected=expected)
                self.assertVerdict(verdict, TestOutcome.TIMEOUT, None, "timed out after 30.2 s; the last ranks")
                self.assertNotIn("still running", verdict.message)
        self.assertVerdict(self.judge(passed(), raised(), timed_out=True), TestOutcome.ERROR, 1, "rank 1 of 2 raised")

    def test_codes_do_not_excuse_a_timeout(self):
        for expected in (ANY_CODE, ABORTS):
            verdict = self.judge(killed(signal.SIGABRT), stopped(), timed_out=True, expected=expected)
            self.assertVerdict(verdict, TestOutcome.TIMEOUT, 1, "rank 0: killed by SIGABRT")


class TestExits(unittest.TestCase):
    """A rank that exits leaves no trace of where: the source shows the calls that it may have come to."""

    def rows(self, source, *reports, name="test_x", is_script=False):
        """The first row of the failure of a test with this source, and its title."""
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder, "test_exits.py")
            file.write_text(textwrap.dedent(source))
            case = Case(name, file=str(file), is_script=is_script)
            failure = judge(world(*reports), False, case).failure
        row = failure.rows[0]
        return failure.title, row.did, None if row.site is None else (row.site.line, row.site.function)

    def test_the_call_in_the_test(self):
        source = """\
            def test_other(): os._exit(1)
            def test_x(rank):
                if rank == 1:
                    os._exit(0)
                dist.barrier()
        """
        expected = "rank 1 of 2 exited with code 0 before the test finished"
        exits = "exited with code 0, probably here", (4, "test_x")
        self.assertEqual(self.rows(source, passed(), exited(0)), (expected, *exits))
        by_parameter = self.rows(source, passed(), exited(0), name="test_x[world_size=2]")
        self.assertEqual(by_parameter, (expected, *exits))

    def test_several_calls(self):
        source = "def test_x():\n    if a: sys.exit(3)\n    raise SystemExit(3)\n"
        self.assertEqual(
            self.rows(source, exited(3))[1:], ("exited with code 3, probably at line 2 or 3", (2, "test_x"))
        )

    def test_a_call_in_another_function(self):
        source = "def helper():\n    _exit(3)\n\ndef test_x():\n    helper()\n"
        self.assertEqual(self.rows(source, exited(3))[1:], ("exited with code 3, probably here", (2, "helper")))

    def test_no_call(self):
        """A library has exited."""
        self.assertEqual(self.rows("def test_x(): library.run()\n", exited(3))[1:], ("exited with code 3", None))
        self.assertEqual(self.rows("def test_x(:\n", exited(3))[1:], ("exited with code 3", None))

    def test_a_script(self):
        title, *row = self.rows("import sys\nsys.exit(2)\n", exited(2), exited(2), name="train.py", is_script=True)
        self.assertEqual(title, "train.py exited with code 2 in all 2 ranks")
        self.assertEqual(row, ["exited with code 2, probably here", (2, "<module>")])
        title, *_ = self.rows("", passed(), exited(3), name="train.py", is_script=True)
        self.assertEqual(title, "train.py exited with code 3 in rank 1 of 2")


class TestRemarks(VerdictTestCase):
    """What was found besides what the title tells."""

    def remarks(self, *sites):
        """What is said of a rank that failed, after a finding with lines at each of these sites, and another one."""
        text = "nobody waited for the work of all_reduce_coalesced [4096, 4096] float32 [4096] float32"
        lines = tuple(Doing(0, text, site) for site in sites)
        found = Finding(FindingKind.UNWAITED, f"rank 0: {text} ({sites[0]})", lines, (0,))
        report = replace(failed(), found=(found, replace(found, sentence="another one")))
        (remark,) = self.judge(report, passed()).failure.remarks
        self.assertLessEqual(len(remark), 80)
        return remark

    def test_the_line_is_not_cut(self):
        sites = [Site("/home/me/test_fsdp_tp_integration.py", line, "test_x") for line in (87, 90)]
        one = self.remarks(sites[0])
        self.assertEqual(one, "also: rank 0: nobody waited for...   test_fsdp_tp_integration.py:87 (and 1 more)")
        several = self.remarks(*sites)
        self.assertEqual(several, "also: rank 0: nobody waited for the work of all_reduce_coalesced... (and 1 more)")


class TestDeclaredCodes(VerdictTestCase):
    """skip_return_code_checks (any code) and special_return_code_checks (rank 0's code)."""

    def test_any_code_excuses_exits_and_signals(self):
        ends = [exited(0), exited(3), exited(10), killed(signal.SIGKILL), killed(signal.SIGSEGV), passed(), skipped()]
        for pair in itertools.product(ends, repeat=2):
            with self.subTest(pair=[(report.ending, report.code) for report in pair]):
                self.assertVerdict(self.judge(*pair, expected=ANY_CODE), TestOutcome.PASSED)

    def test_no_code_excuses_an_exception(self):
        for expected in (ANY_CODE, Expected(code=10), ABORTS):
            for bad, outcome in (
                (failed(), TestOutcome.FAILED),
                (raised(), TestOutcome.ERROR),
                (lost(), TestOutcome.ERROR),
            ):
                for reports, culprit in (((bad, killed(signal.SIGABRT)), 0), ((killed(signal.SIGABRT), bad), 1)):
                    with self.subTest(expected=expected, ending=bad.ending, culprit=culprit):
                        self.assertVerdict(self.judge(*reports, expected=expected), outcome, culprit)

    def test_the_expected_code_is_rank_0s(self):
        good = [
            (killed(signal.SIGABRT), killed(signal.SIGABRT)),
            (killed(signal.SIGABRT), passed()),
            (killed(signal.SIGABRT), killed(signal.SIGKILL)),
            (killed(signal.SIGABRT), exited(1)),
        ]
        for pair in good:
            with self.subTest(pair=[(report.ending, report.code) for report in pair]):
                self.assertVerdict(self.judge(*pair, expected=ABORTS), TestOutcome.PASSED)

    def test_another_code_than_expected(self):
        table = [
            (passed(), "exit code 0"),
            (exited(0), "exit code 0"),
            (exited(6), "exit code 6"),
            (killed(signal.SIGKILL), "exit code -9 (SIGKILL)"),
        ]
        for first, had in table:
            with self.subTest(had=had):
                verdict = self.judge(first, killed(signal.SIGABRT), expected=ABORTS)
                title = f"rank 0 of 2 should have ended with exit code -6 (SIGABRT), but ended with {had}\n"
                self.assertVerdict(verdict, TestOutcome.FAILED, 0, title, "rank 1: killed by SIGABRT")

    def test_expected_code_0_is_a_clean_exit(self):
        self.assertVerdict(self.judge(passed(), exited(3), expected=Expected(code=0)), TestOutcome.PASSED)

    def test_a_skip_is_a_skip_whatever_code_was_expected(self):
        verdict = self.judge(skipped("no NCCL"), skipped("no NCCL"), expected=ABORTS)
        self.assertEqual(verdict, Verdict(TestOutcome.SKIPPED, "no NCCL", code=86))

    def test_ranks_disagree_whatever_code_was_expected(self):
        for pair in ((skipped(), killed(signal.SIGABRT)), (killed(signal.SIGABRT), skipped())):
            verdict = self.judge(*pair, expected=ABORTS)
            self.assertVerdict(verdict, TestOutcome.FAILED, int(pair[1].ending is RankEnding.SKIPPED), "skipped")

    def test_any_code_overrides_a_specific_one(self):
        verdict = self.judge(exited(3), passed(), expected=Expected(any_code=True, code=-signal.SIGABRT))
        self.assertVerdict(verdict, TestOutcome.PASSED)

    def test_which_endings_decide(self):
        """The other ranks are ended soon after an ending that decides, so this must agree with the verdict."""
        for expected in (Expected(), ANY_CODE, ABORTS):
            for report in ONE_OF_EACH:
                with self.subTest(expected=expected, ending=report.ending):
                    always = report.ending in (RankEnding.FAILED, RankEnding.ERROR, RankEnding.LOST, RankEnding.STOPPED)
                    by_code = report.ending in (RankEnding.EXITED, RankEnding.KILLED) and expected == Expected()
                    self.assertIs(expected.decides(report), always or by_code)


class TestCulprits(VerdictTestCase):
    def test_two_culprits_earliest_first(self):
        first, second = raised("ValueError: early", 1.0), raised("KeyError: late", 1.3)
        for reports, culprit in (((first, second), 0), ((second, first), 1)):
            verdict = self.judge(*reports)
            self.assertVerdict(
                verdict,
                TestOutcome.ERROR,
                culprit,
                f"rank {culprit} of 2 raised ValueError: early",
                f"rank {culprit}: error after 1.00 s: ValueError: early",
                f"rank {1 - culprit}: error after 1.30 s: KeyError: late",
                f"rank {culprit}'s traceback:\nTraceback:\nValueError: early",
                f"rank {1 - culprit}'s traceback:\nTraceback:\nKeyError: late",
            )

    def test_the_first_to_end_counts_not_the_shortest_run(self):
        """A rank that is a new interpreter may start seconds after another."""
        early, late = but(raised(seconds=3.0), ended=13.0), but(raised(seconds=1.0), ended=14.0)
        self.assertVerdict(self.judge(late, early), TestOutcome.ERROR, 1, "all 2 ranks raised", "rank 1's traceback")

    def test_outcome_is_that_of_the_culprit(self):
        self.assertVerdict(self.judge(failed(seconds=1.0), raised(seconds=1.1)), TestOutcome.FAILED, 0)
        self.assertVerdict(self.judge(failed(seconds=1.1), raised(seconds=1.0)), TestOutcome.ERROR, 1)
        self.assertVerdict(self.judge(failed(seconds=1.1), killed(signal.SIGSEGV, 1.0)), TestOutcome.CRASHED, 1)

    def test_victims_come_after_the_culprit(self):
        """Also if they failed before the culprit was reaped."""
        for culprit in (raised(seconds=1.2), failed(seconds=1.2), killed(signal.SIGKILL, 1.2), exited(0, 1.2)):
            with self.subTest(ending=culprit.ending):
                verdict = self.judge(victim(1.0), culprit, victim(1.1))
                self.assertEqual(verdict.culprit, 1)
                lines = verdict.message.splitlines()
                self.assertTrue(lines[0].startswith("rank 1 of 3 "), lines[0])
                self.assertTrue(lines[3].startswith("  rank 1: "), lines[3])
                for line, rank in ((lines[4], 0), (lines[5], 2)):
                    self.assertTrue(line.startswith(f"  rank {rank}: error after"), line)
                    self.assertTrue(line.endswith("(lost its peer because of rank 1)"), line)

    def test_a_victims_traceback_is_left_out(self):
        message = self.judge(victim(), killed(signal.SIGSEGV)).message
        self.assertNotIn("rank 0's traceback", message)

    def test_only_victims_the_first_is_shown(self):
        """Its peer passed: the cause of the lost connection is unknown, so the first victim is shown."""
        verdict = self.judge(victim(1.1), victim(1.0), passed())
        self.assertVerdict(verdict, TestOutcome.ERROR, 1, "rank 1 of 3 raised", "rank 1's traceback:")
        self.assertNotIn("rank 0's traceback", verdict.message)
        self.assertIn("(lost its peer because of rank 1)", verdict.message)

    def test_only_an_error_makes_a_victim(self):
        self.assertTrue(is_victim(victim()))
        self.assertFalse(is_victim(raised()))
        self.assertFalse(is_victim(but(raised(), cause=Cause.TIMED_OUT)))
        for report in (failed(), killed(9), exited(1), passed(), skipped()):
            self.assertFalse(is_victim(but(report, cause=Cause.LOST_PEER)), report)

    def test_a_freed_buffer_explains_how_ranks_ended(self):
        """By a signal, or by an error of gloo about an address that is not there; not by another error."""
        race = Finding(FindingKind.RACE, "rank 0: a buffer was freed", (), (0,))
        reports = {
            "a signal": (killed(signal.SIGSEGV), TestOutcome.FAILED),
            "an address": (raised("RuntimeError: writev [127.0.0.1]:5555: Bad address"), TestOutcome.FAILED),
            "another error": (raised("ValueError: broken"), TestOutcome.ERROR),
        }
        for name, (second, outcome) in reports.items():
            with self.subTest(name):
                verdict = self.judge(but(victim(), found=(race,)), second)
                self.assertEqual(verdict.outcome, outcome)
                self.assertEqual(verdict.message.startswith(race.sentence), outcome is TestOutcome.FAILED)

    def test_same_moment_lowest_rank_first(self):
        reports = passed(), raised("ValueError: one"), raised("ValueError: two")
        self.assertVerdict(self.judge(*reports), TestOutcome.ERROR, 1, "rank 1's", "rank 2's")

    def test_a_rank_that_we_ended_is_not_the_culprit(self):
        verdict = self.judge(stopped(1.0), killed(signal.SIGKILL, 1.4))
        self.assertVerdict(
            verdict, TestOutcome.CRASHED, 1, "rank 1: killed by SIGKILL", "rank 0: still running after 1.00 s"
        )


class TestMessages(VerdictTestCase):
    def test_all_ranks_are_listed_the_culprit_first_then_in_order(self):
        message = self.judge(passed(), passed(), passed(), exited(3)).message
        lines = [line for line in message.splitlines() if line.startswith("  rank ")]
        self.assertEqual([line[:9] for line in lines], ["  rank 3:", "  rank 0:", "  rank 1:", "  rank 2:"])

    def test_a_whole_message(self):
        running = stopped(
            stacks='Current thread 0x1 (most recent call first):\n  File "/home/me/test_thing.py", line 9 in test_x',
        )
        reports = world(
            running,
            but(killed(signal.SIGKILL, 0.84), output="step 1\nstep 2", leftovers=("pid 77: sleep 60", "pid 78: cat")),
        )
        self.assertEqual(
            judge(reports, False, CASE).message,
            """\
rank 1 of 2 was killed by SIGKILL (out of memory?)
(TestThing.test_x, 1.5 s after its start)

  rank 1: killed by SIGKILL after 0.84 s (out of memory?)
  rank 0: still running after 1.50 s, terminated

where the running ranks are:
  rank 0: test_thing.py:9 in test_x; its collectives are not known (it did not answer)

rank 1's last lines of output:
step 1
step 2

rank 1 left running (now terminated): pid 77: sleep 60; pid 78: cat

rank 0's stacks, most recent call first:
Current thread 0x1 (most recent call first):
  File "/home/me/test_thing.py", line 9 in test_x

To run it alone:
  python test_thing.py TestThing.test_x""",
        )

    def test_every_failure_gives_the_command_to_run_it_again(self):
        for report in ONE_OF_EACH:
            if report.ending is RankEnding.PASSED:
                continue
            message = self.judge(passed(), report).message
            self.assertTrue(message.endswith("To run it alone:\n  python test_thing.py TestThing.test_x"), message)

    def test_without_a_command_it_is_not_mentioned(self):
        self.assertNotIn("run it alone", judge(world(raised()), False, Case("t")).message)

    def test_output_of_the_culprits_alone(self):
        reports = world(
            *(but(report, output=f"printed {at}") for at, report in enumerate((raised(), victim(), passed())))
        )
        message = judge(reports, False, CASE).message
        self.assertIn("rank 0's last lines of output:\nprinted 0", message)
        self.assertNotIn("printed 1", message)
        self.assertNotIn("printed 2", message)

    def test_output_of_all_running_ranks_in_a_hang(self):
        reports = world(
            *(but(report, output=f"printed {at}") for at, report in enumerate((stopped(), passed(), stopped())))
        )
        message = judge(reports, True, CASE).message
        self.assertIn("printed 0", message)
        self.assertIn("printed 2", message)
        self.assertNotIn("printed 1", message)

    def test_long_output_is_cut_with_a_note(self):
        long = but(raised(), output="a" * 9000 + "b" * 9000)
        message = self.judge(long).message
        self.assertLess(len(message), 8000)
        self.assertInOrder(message, "aaa", "12000 characters cut here", "bbb")

    def test_a_long_summary_does_not_fill_the_list_of_ranks(self):
        message = self.judge(passed(), raised("ValueError: " + "x" * 5000)).message
        (line,) = [line for line in message.splitlines() if line.startswith("  rank 1: ")]
        self.assertLess(len(line), 300)

    def test_the_account_of_a_rank_that_crashed_while_exiting(self):
        crashed = but(killed(signal.SIGSEGV), account=RankAccount(RankEnding.PASSED, 0.0, 1.0))
        message = self.judge(crashed, passed()).message
        self.assertIn("rank 0: killed by SIGSEGV after 1.00 s; before that: the test had passed", message)

    def test_leftovers_of_all_ranks(self):
        reports = world(raised(), but(passed(), leftovers=("pid 5: sleep 9",)))
        self.assertIn("rank 1 left running (now terminated): pid 5: sleep 9", judge(reports, False, CASE).message)

    def test_stacks_of_running_ranks(self):
        reports = world(raised(), stopped(stacks='Thread 1:\n  File "a.py", line 1 in f\n'), stopped())
        message = judge(reports, False, CASE).message
        self.assertIn('rank 1\'s stacks, most recent call first:\nThread 1:\n  File "a.py", line 1 in f\n\nTo', message)
        self.assertNotIn("rank 2's stacks", message)

    def test_a_pass_is_silent(self):
        reports = world(but(passed(), output="noise", leftovers=("pid 5: sleep 9",)))
        self.assertEqual(judge(reports, False, CASE).message, "")


class TestScreen(VerdictTestCase):
    CASE = replace(CASE, show_command="show it")

    def screen_of(self, reports, finding=None):
        return judge(reports, False, self.CASE, finding=finding).failure.screen

    def test_a_row_has_only_ranks_that_called_the_same(self):
        """However they have ended: here two of three that called the same have aborted, and so has the culprit."""
        site = Site(CASE.file, 7, "test_x")
        lines = tuple(Doing(rank, f"all_reduce [{5 if rank == 1 else 4}]", site) for rank in range(4))
        finding = Finding(FindingKind.MISMATCH, "ranks disagree", lines, (1,))
        failing = but(raised(), sites=(site,))
        shown = self.screen_of(world(failing, killed(signal.SIGABRT), killed(signal.SIGABRT), failing), finding)
        self.assertIn("  rank 1         all_reduce [5]  test_thing.py:7 in test_x\n", shown)
        self.assertIn("  ranks 0, 2, 3  all_reduce [4]  test_thing.py:7 in test_x\n", shown)
        shown = self.screen_of(world(failing, failing, failing, failing), finding)
        self.assertIn("  rank 1         all_reduce [5]", shown)

    def test_the_example_in_which_a_peer_was_lost(self):
        example = "test_x(n=17, values=[1.5, 2.5], name='a name that is long enough to be cut')"
        survivor = but(raised(f"PeerLost: rank 0 was lost in this example: {example}"), example=example)
        shown = self.screen_of(world(killed(signal.SIGKILL), survivor))
        self.assertIn(f"in this example: {example}\n", shown)

    @unittest.skipIf(sys.version_info < (3, 11), "ExceptionGroup is new in 3.11")
    def test_the_exceptions_of_a_group(self):
        try:
            int("x")
        except ValueError as error:
            inner = ExceptionGroup("inner", [KeyError("gone"), error])  # noqa: F821
        group = ExceptionGroup("some parts failed", [OSError("no disk"), inner])  # noqa: F821
        view = view_of_error(group, self.CASE)
        self.assertEqual(view.title, "ExceptionGroup: some parts failed (2 sub-exceptions)")
        first, second, third = (value.text for value in view.values)
        self.assertEqual((first, second), ("OSError: no disk", "KeyError: 'gone'"))
        self.assertRegex(third, r"ValueError: invalid literal .*, at test_verdict.py:\d+ in test_the_exceptions")
        self.assertIn("\n  OSError: no disk\n", view.screen)


if __name__ == "__main__":
    run_tests()

"""Sweeps that a run asks for: programs with known matrices, what fails them, and the tests that are left out."""

import contextlib
import json
import tempfile
import unittest
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from kit.files import write
from kit.outcomes import outcome_of
from kit.ranks import OneRank, Ranks, wait_for

from torch_testing_ext._process import messages
from torch_testing_ext._tests import notes
from torch_testing_ext._tests.outcomes import TestOutcome
from torch_testing_ext.common_distributed import MultiThreadedTestCase
from torch_testing_ext.common_utils import run_tests
from torch_testing_ext.faults import (
    FaultPlan,
    KnownFailure,
    Points,
    Sweep,
    Wrong,
    abort,
    call,
    exits,
    fault_of_text,
    fault_point,
    faults,
    faults_of_text,
    kill,
    mark,
    raises,
    segv,
    slow,
    step,
    stop,
    store,
)
from torch_testing_ext.launch import RankEnding, RankReport, Verdict
from torch_testing_ext.launch.known_hangs import KnownFile
from torch_testing_ext.launch.seen_faults import FaultsSeen, HappenedFault
from torch_testing_ext.launch.sweeps import sweep_verdict
from torch_testing_ext.runner import run_again
from torch_testing_ext.runner.options import UsageError
from torch_testing_ext.runner.options.sources import read_options
from torch_testing_ext.runner.report import sweep_section


class Programs(Ranks):
    """Each rank has a group of its own, so that no call depends on the other rank."""

    def alone(self):
        self.join_group(timeout=timedelta(seconds=5))
        group = [dist.new_group([rank]) for rank in range(2)][self.rank]
        # One that ends too early would break the connections that the other still makes.
        Path(f"{self.file_name}.{self.rank}").touch()
        wait_for(Path(f"{self.file_name}.{1 - self.rank}").exists)
        return group

    def hangs(self):
        """Rank 0 waits for what rank 1 does behind its second call; rank 1 survives an error of its first one."""
        group = self.alone()
        done = Path(f"{self.file_name}.done")
        with contextlib.suppress(ValueError):
            dist.all_reduce(torch.ones(1), group=group)
        fault_point("half")
        dist.all_reduce(torch.ones(1), group=group)
        if self.rank == 1:
            done.touch()
        wait_for(done.exists)

    def recovers(self):
        self.join_group(timeout=timedelta(seconds=5))
        with contextlib.suppress(RuntimeError):
            dist.all_reduce(torch.ones(1))

    @faults(kill(1, at=call(1)), within=20)
    def has_own(self):
        dist.all_reduce(torch.ones(1), group=self.alone())

    def passes_nothing(self):
        pass


class Alone(OneRank):
    def passes(self):
        pass


class Judging(Ranks):
    def _check_return_codes(self, fn, elapsed_time):
        super()._check_return_codes(fn, elapsed_time)

    def passes(self):
        pass


class Threads(MultiThreadedTestCase):
    world_size = 2

    def setUp(self):
        super().setUp()
        self._spawn_threads()

    def passes(self):
        pass


def swept(test, text, points="call", wrong=Wrong.NOTHING, within=10.0, known=()):
    """Run a test in a sweep of the run; its outcome, and what was noted."""
    sweep = Sweep(faults_of_text(text), Points(points), within=within, known=known, wrong=wrong)
    setting = json.dumps(messages.encode(sweep))
    notes.take_notes()
    with mock.patch.dict("os.environ", _TORCH_TESTING_EXT_SWEEP=setting):
        seen = outcome_of(test)
    return seen, notes.take_notes().sweeps


def ends(report):
    """By fault: the words of its cells."""
    return {cell.fault: sweep_section.cell_words((cell,), with_seconds=False) for cell in report.cells}


class ProgramsTest(unittest.TestCase):
    def test_the_death_that_hangs(self):
        seen, (report,) = swept(Programs("hangs"), "raises(ValueError)", within=2.0)
        self.assertEqual(seen.outcome, "passed", seen.message)
        expected = {
            "raises(ValueError, rank=0, at=call(1))": "passed",
            "raises(ValueError, rank=0, at=call(2))": "passed",
            "raises(ValueError, rank=1, at=call(1))": "passed",
            "raises(ValueError, rank=1, at=call(2))": "hung",
        }
        self.assertEqual(ends(report), expected)
        (hang,) = report.hangs(known=False)
        self.assertIn("raises(ValueError, rank=1, at=call(2)) at all_reduce #2", hang)
        self.assertIn("rank 1 raised ValueError", hang)

    def test_a_hang_fails_if_that_is_wanted(self):
        known = KnownFailure(kill(1, at=mark("half")), "the reason", "test_sweeps_of_runs.py::Programs::hangs")
        gone = replace(known, fault=kill(0, at=mark("half")))
        no_more = replace(known, fault=kill(1, at=mark("half", 2)))
        other = replace(known, test="Others::hangs", fault=kill(1, at=mark("half", 3)))
        options = {"points": "mark", "within": 2.0, "wrong": Wrong.HANGS}
        seen, (report,) = swept(Programs("hangs"), "kill", **options, known=(known,))
        self.assertEqual(seen.outcome, "passed", seen.message)
        self.assertEqual(list(ends(report).values()), ["passed", "hung, known"])
        seen, (report,) = swept(Programs("hangs"), "kill", **options, known=(gone, no_more, other))
        self.assertIn("1 of 2 faults hang this test, and 2 known to hang it do so no more; the first: ", seen.message)
        self.assertIn("passes, though known to hang: the reason", seen.message)
        told = [f"{gone.fault}: passed; known to hang: the reason"]
        told.append(f"{no_more.fault}: there is no such point any more; known to hang: the reason")
        self.assertEqual(report.fails_no_more(), told)

    def test_recovery_is_told_apart(self):
        seen, (report,) = swept(Programs("recovers"), "kill", within=20.0)
        self.assertEqual(seen.outcome, "passed", seen.message)
        self.assertEqual(set(ends(report).values()), {"recovered"})

    def test_left_out(self):
        for test, why in (
            (Programs("has_own"), "it has faults of its own"),
            (Alone("passes"), "it has one rank, and nobody survives that"),
            (Judging("passes"), "its class judges exit codes itself, by _check_return_codes"),
            (Threads("passes"), "its ranks are threads, of which none can die alone: use MultiProcessTestCase"),
            (Programs("passes_nothing"), "its ranks pass no point of the kind: call"),
        ):
            with self.subTest(why=why):
                seen, reports = swept(test, "kill")
                self.assertEqual(seen.outcome, "passed", seen.message)
                self.assertEqual(next(report.why_not for report in reports if report.why_not), why)
                self.assertFalse([cell for report in reports if report.is_of_run for cell in report.cells])


def invented(plan, counts=(2, 2), happens=True, ending=RankEnding.PASSED):
    """The reports of ranks that have passed so many barriers, of which one had a fault."""
    reports = [
        RankReport(rank, RankEnding.PASSED, ended=11.0, faults=FaultsSeen(passed={"barrier": times, "step": 1}))
        for rank, times in enumerate(counts)
    ]
    for fault in plan.faults:
        happened = (HappenedFault(0, fault, "at barrier #1", 10.0),) if happens else ()
        reports[fault.rank] = replace(reports[fault.rank], ending=ending, faults=FaultsSeen(happened))
    return reports


class InventedRunsTest(unittest.TestCase):
    def report_of(self, run, faults="kill", points="call", wrong=Wrong.NOTHING):
        notes.take_notes()
        verdict = sweep_verdict(Sweep(faults_of_text(faults), Points(points), wrong=wrong), run)
        return verdict, notes.take_notes().sweeps

    def test_ranks_that_pass_different_numbers_of_points(self):
        verdict, (report,) = self.report_of(lambda plan: (invented(plan, (3, 1)), Verdict(TestOutcome.PASSED)))
        self.assertIs(verdict.outcome, TestOutcome.PASSED)
        (matrix,) = sweep_section.matrices(report)
        self.assertEqual(matrix.head, ["kill", "rank 0", "rank 1"])
        rows = {title: [sweep_section.cell_words(cells) for cells in columns] for title, columns in matrix.rows}
        self.assertEqual(rows, {"call(1)": ["passed 1.00 s"] * 2, "call(2) to call(3)": ["passed 1.00 s", "-"]})

    def test_a_rank_that_does_not_come_to_the_point_again(self):
        verdict, (report,) = self.report_of(
            lambda plan: (
                invented(plan, happens=False),
                Verdict(TestOutcome.FAILED if plan.faults else TestOutcome.PASSED),
            ),
            wrong=Wrong.HANGS,
        )
        self.assertIs(verdict.outcome, TestOutcome.PASSED)
        self.assertEqual({cell.end for cell in report.cells}, {"did not happen"})

    def test_a_test_that_fails_or_skips_by_itself(self):
        for outcome in (TestOutcome.FAILED, TestOutcome.SKIPPED):
            runs = []

            def run(plan, outcome=outcome, runs=runs):
                runs.append(plan)
                return invented(plan), Verdict(outcome, "the reason")

            verdict, reports = self.report_of(run)
            self.assertIs(verdict.outcome, outcome)
            self.assertEqual((runs, reports), ([FaultPlan()], ()))
        self.assertEqual(verdict.message, "the reason")

    def test_all_points(self):
        tried = []
        self.report_of(
            lambda plan: (tried.extend(plan.faults), (invented(plan, (1,)), Verdict(TestOutcome.PASSED)))[1],
            "kill, stop(2)",
            "all",
        )
        at = ["call(1)", "step(1)"]
        self.assertEqual([str(each.at) for each in tried], at * 2)
        self.assertEqual([(each.kind, each.seconds) for each in tried], [("kill", None)] * 2 + [("stop", 2)] * 2)


class WordsTest(unittest.TestCase):
    def read(self, *words):
        with tempfile.TemporaryDirectory() as folder:
            return read_options(words, {}, Path(folder), Path(folder)).options

    def test_faults(self):
        for text in (
            "kill",
            "segv",
            "abort",
            "stop",
            "stop(2)",
            "slow(1)",
            "hold_gil(0.5)",
            "exits(3)",
            "raises(OSError)",
        ):
            self.assertEqual(str(fault_of_text(text)), text)
            self.assertEqual(self.read("--sweep", text).sweep, text)
        self.assertEqual(self.read("--sweep", "kill(), stop,kill").sweep, "kill, stop")
        self.assertEqual(faults_of_text("stop(2.5), raises(OSError)"), (stop(2.5), raises(OSError)))

    def test_faults_as_reports_write_them(self):
        for fault in (
            kill(1, at=call(2)),
            stop(rank=0, at=step(3)),
            slow(0.5, 2, at=mark("it's half", 2)),
            exits(3, 0, at=mark("a, b=(c)")),
            segv(0, at=call(2, "all_reduce", group=(0, 1), phase="after")),
            abort(0, at=store(2, op="set")),
            raises(OSError, 1, at=call(1)),
        ):
            self.assertEqual(fault_of_text(str(fault)), fault)
        self.assertEqual(fault_of_text(" kill( 1,at=call( n=2 ) ) "), kill(1, at=call(2)))

    def test_known_hangs_are_found_by_the_end_of_a_name(self):
        known = KnownFailure(kill(1, at=call(2)), "why", "T::test")
        for test, is_of in (("test_x.py::T::test", True), ("T::test", True), ("XT::test", False), ("T::test2", False)):
            self.assertIs(known.is_of(test), is_of)
        strangers = KnownFile(Path("known.toml"), (known,)).strangers(["test_x.py::XT::test"])
        self.assertEqual(strangers, ["known.toml: no test of this run is 'T::test', which is known to hang"])
        self.assertEqual(KnownFile(Path("known.toml"), (known,)).strangers(["T::test", "other"]), [])

    def test_the_command_to_run_again(self):
        words = ("--sweep", "kill", "-o", "sweep.points=steps", "-o", "sweep.fail=hang")
        self.assertIn(" ".join(words), run_again.command(self.read(*words)))

    def test_mistakes(self):
        for words, told in (
            (("--sweep", "kil"), "'kil' is not a fault; known are kill, segv"),
            (("--sweep", ""), "'' is not a fault, such as kill"),
            (("--sweep", "kill:3"), "'kill:3' is not a fault, such as kill, stop(2)"),
            (("--sweep", "kill(rank=1)"), "kill(rank=1): leave out rank and point: all are tried"),
            (("--sweep", "kill(seconds=1)"), "kill(seconds=1): kill() got an unexpected keyword argument"),
            (("--sweep", "slow"), "slow(): slow() missing 1 required positional argument: 'seconds'"),
            (("--sweep", "slow(x)"), "'x' is not an exception of Python"),
            (("--sweep", "slow('x')"), "give the seconds that it lasts"),
            (("--sweep", "slow(0)"), "greater than 0"),
            (("--sweep", "exits(300)"), "a number from 0 to 255"),
            (("--sweep", "raises(Nothing)"), "'Nothing' is not an exception of Python"),
            (("--sweep", "raises(UnicodeDecodeError)"), "give an exception that is made"),
            (("--sweep", "stop(print())"), "'print()' is not a fault"),
            (("--sweep", "kill", "-o", "sweep.points=call"), "'call' is not one of calls, steps, all"),
            (("--sweep", "kill", "-o", "sweep.within=0"), "not a positive number of seconds"),
            (("--sweep", "kill", "-o", "sweep.fail=error"), "'error' is not one of nothing, hang"),
            (("-o", "sweep.fail=hang"), "-o sweep.fail needs --sweep"),
            (("--sweep", "kill", "--pdb"), "--sweep and --pdb cannot be combined"),
            (("--sweep", "kill", "--trace"), "--sweep and --trace cannot be combined"),
            (("--sweep", "kill", "-o", "sweep.known=none.toml"), "No such file"),
        ):
            with self.subTest(words=words), self.assertRaises(UsageError) as caught:
                self.read(*words)
            self.assertIn(told, str(caught.exception))
            self.assertNotIn("\n", str(caught.exception))

    @unittest.skipIf(not __import__("importlib.util").util.find_spec("tomllib"), "this Python cannot read TOML")
    def test_mistakes_in_the_known_hangs(self):
        whole = 'test = "T::test"\nfault = "kill(rank=1, at=call(2))"\nreason = "why"\n'
        inline = ", ".join(whole.replace("kill", "kil").splitlines())
        for content, told in (
            ("[[known]\n", "known.toml"),
            (f"[known]\n{whole}", "in double brackets"),
            (f"[[knwon]]\n{whole}", "knwon is not a table of this file"),
            (f'[[known]]\n{whole}reasn = ""\n', "reasn is not one of test, fault, reason. Did you mean: reason"),
            ('[[known]]\ntest = "T::test"\n', "fault is missing"),
            (f"[[known]]\n{whole.replace('kill', 'kil')}", "'kil' is not a fault; known are kill, segv"),
            (f"[[known]]\n{whole.replace(', at=call(2)', '')}", "'kill(rank=1)' has no rank and point"),
            (f"[[known]]\n{whole}[[known]]\n{whole.replace('call(2)', 'call(0)')}", "line 5: call: n is 0; the first"),
            (f"[[known]]\n{whole.replace('call(2)', 'call(2, 3)')}", "call(2, 3): there is no such operation"),
            (f"[[known]]\n{whole.replace('call(2)', '2')}", "kill: at is 2; give a point"),
            (f"[[known]]\n{whole.replace('rank=1', 'rank=-1')}", "a rank is a number, 0 or more"),
            (f"known = [{{ {inline} }}]", "number 1: 'kil' is not a fault"),
        ):
            with self.subTest(told=told), tempfile.TemporaryDirectory() as folder:
                file = write(Path(folder), "known.toml", content)
                with self.assertRaises(UsageError) as caught:
                    self.read("--sweep", "kill", "-o", f"sweep.known={file}")
                self.assertIn(told, str(caught.exception))


if __name__ == "__main__":
    run_tests()

"""Every aspect of a test in every host of ranks: it works there, or the table of gaps says why not."""

import contextlib
import os
import re
import unittest
import warnings
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from kit.aspect_bodies import BODIES
from kit.outcomes import Seen, outcome_of
from kit.planted_ranks import outcome_with_tear_down
from kit.processes import ROOT
from kit.ranks import Ranks

from torch_testing_ext._process.setting_readers import read_boolean
from torch_testing_ext._tests.outcomes import TestOutcome
from torch_testing_ext.common_distributed import MultiProcContinuousTest, MultiProcessTestCase, MultiThreadedTestCase
from torch_testing_ext.common_utils import run_tests
from torch_testing_ext.faults import call, faults, kill
from torch_testing_ext.launch import session
from torch_testing_ext.launch.accounts import OwnWarning, RankAccount, RankEnding
from torch_testing_ext.launch.aspect import Aspect, in_force
from torch_testing_ext.launch.aspects import ASPECTS
from torch_testing_ext.launch.aspects.nodes import NODES
from torch_testing_ext.launch.aspects.remarks import Remarks
from torch_testing_ext.launch.aspects.warnings_of_ranks import WARNINGS
from torch_testing_ext.launch.aspects.world import SIZE
from torch_testing_ext.launch.attempts import Host, RankAttempt, RanksEnd, TestPlan
from torch_testing_ext.launch.host_kinds import HostKind
from torch_testing_ext.launch.rank_reports import RankReport
from torch_testing_ext.launch.verdict import Case, Verdict
from torch_testing_ext.ranks import run_script, spawn
from torch_testing_ext.runner import aspects_of_run
from torch_testing_ext.runner.options import OPTION_TABLE, Options

WORLD_SIZE = 2
PAGE = ROOT / "docs" / "contribute" / "architecture.md"


METHODS = {name: lambda self, body=body: body(self.rank) for name, body in BODIES.items()}


@faults(kill(1, at=call(1)))
def dies(self):
    """A test whose rank 1 is to die in its first collective."""
    dist.init_process_group("gloo", init_method="env://") if not dist.is_initialized() else None
    with contextlib.suppress(RuntimeError):
        dist.barrier()


METHODS["dies"] = dies


class Threads(MultiThreadedTestCase):
    world_size = WORLD_SIZE

    def setUp(self):
        super().setUp()
        self._spawn_threads()


class StartsItself(MultiProcessTestCase):
    """Starts its ranks as PyTorch's classes do that override `_start_processes`."""

    world_size = WORLD_SIZE

    def setUp(self):
        super().setUp()
        self._spawn_processes()

    def _start_processes(self, proc):
        self.processes, self.pid_to_pipe = [], {}
        context = torch.multiprocessing.get_context("fork")
        for rank in range(WORLD_SIZE):
            process = context.Process(target=os._exit, args=(0,), name=f"process {rank}")
            process.start()
            self.processes.append(process)


class Kept(MultiProcContinuousTest):
    world_size = WORLD_SIZE


def case_of_kind(base, name):
    return type(base.__name__, (base,), METHODS)(name)


def run_kind(kind, name):
    """Run a body in ranks of this kind; return the outcome with its message."""
    if kind is HostKind.INHERITING:
        return outcome_of(unittest.FunctionTestCase(lambda: spawn(BODIES[name], WORLD_SIZE)))
    if kind is HostKind.SCRIPT:
        script = Path(__file__).with_name("subjects") / "aspect_in_script.py"
        return outcome_of(unittest.FunctionTestCase(lambda: run_script(script, name, world_size=WORLD_SIZE)))
    if kind is HostKind.WORLD:
        with mock.patch.dict(os.environ, {SIZE.name: str(WORLD_SIZE)}):
            return outcome_of(case_of_kind(Ranks, name))
    bases = {HostKind.FRESH: Ranks, HostKind.KEPT: Kept, HostKind.THREADS: Threads, HostKind.OWN: StartsItself}
    # Ranks that tests share end with their class.
    return Seen(*outcome_with_tear_down(case_of_kind(bases[kind], name)))


# torchrun takes seconds, and a launcher has its own tests: test_under_torchrun.py, _pytest_ranks/test_launched.py.
KINDS = [kind for kind in HostKind if kind not in (HostKind.TORCHRUN, HostKind.LAUNCHED)]


class EveryAspectTest(unittest.TestCase):
    """Each aspect that a host has is seen to work in it."""

    def each_kind_with(self, name, check):
        """Call `check` with each kind of ranks that has the aspect of this name."""
        (aspect,) = (aspect for aspect in ASPECTS if aspect.name == name)
        for kind in KINDS:
            if kind not in aspect.gaps:
                with self.subTest(host=kind.name):
                    check(kind)

    def test_addresses(self):
        def check(kind):
            # Ranks that tests share have met before the test.
            if kind is not HostKind.KEPT:
                self.assertEqual(run_kind(kind, "has_an_address").outcome, "passed")

        self.each_kind_with("addresses", check)

    def test_sanitizer(self):
        with mock.patch.dict(os.environ, {"TORCH_TESTING_EXT_SANITIZE": "nan"}):
            self.each_kind_with("sanitizer", lambda kind: self.assertIn("NaN", run_kind(kind, "reduces_nan").message))

    def test_warnings(self):
        def check(kind):
            with warnings.catch_warnings(record=True) as seen:
                warnings.simplefilter("always")
                self.assertEqual(run_kind(kind, "warns").outcome, "passed")
            texts = {str(warning.message) for warning in seen}
            self.assertLessEqual({"warned in rank 0", "warned in rank 1"}, texts)

        with mock.patch.dict(os.environ, {"PYTEST_CURRENT_TEST": "test"}):
            self.each_kind_with("warnings", check)

    def test_leftovers(self):
        def check(kind):
            with mock.patch("sys.stderr") as stderr:
                # A rank of a world may not start a process, as far as Python knows.
                body = "leaves_a_fork" if kind is HostKind.WORLD else "leaves_a_process"
                self.assertEqual(run_kind(kind, body).outcome, "passed")
            written = "".join(call.args[0] for call in stderr.write.call_args_list)
            self.assertRegex(written, r"rank \d left running")

        self.each_kind_with("leftovers", check)

    def test_nodes(self):
        with mock.patch.dict(os.environ, {NODES.name: "2"}):
            self.each_kind_with("nodes", lambda kind: self.assertEqual(run_kind(kind, "is_alone").outcome, "passed"))
        self.assertIn("is not alone", run_kind(HostKind.FRESH, "is_alone").message)

    def test_faults_and_what_refuses_them(self):
        (aspect,) = (aspect for aspect in ASPECTS if aspect.name == "faults")
        for kind in (HostKind.FRESH, HostKind.KEPT, HostKind.THREADS, HostKind.OWN, HostKind.WORLD):
            with self.subTest(host=kind.name):
                seen = run_kind(kind, "dies")
                if kind not in aspect.gaps:
                    self.assertEqual(seen.outcome, "passed", seen.message)
                else:
                    self.assertNotEqual(seen.outcome, "passed")
                    self.assertIn(aspect.gaps[kind], seen.message)


class DeclarationsTest(unittest.TestCase):
    """What the runner and pytest derive from aspects."""

    def test_the_runner_has_each_option(self):
        for aspect in ASPECTS:
            for option in aspect.options:
                with self.subTest(option.field):
                    self.assertEqual(option.field in OPTION_TABLE, option.in_runner)
                    if option.in_runner:
                        self.assertEqual(Options().value(option), option.default)

    def test_a_variable_carries_the_value_of_each_option(self):
        given = {"world_size": "4", "simulate": "8", "sanitize": "nan", "sanitize_order": "fail", "stream": "1"}
        given |= {"nodes": "2"}
        declared = [option for aspect in ASPECTS for option in aspect.options if option.setting is not None]
        given |= {option.field: "1" for option in declared if option.read is read_boolean}
        self.assertEqual({option.field for option in declared}, set(given), "an option is not tested")
        for option in declared:
            with self.subTest(option.field):
                options = Options(**{option.field: option.read(given[option.field])})
                environ = aspects_of_run.variables(options, 0)
                self.assertNotEqual(option.setting.value(environ), option.setting.default)
                self.assertNotIn(option.setting.name, aspects_of_run.variables(Options(), 0))

    def test_options_are_apart_from_ones_that_exist(self):
        of_pytest = {option.field for aspect in ASPECTS for option in aspect.options}
        for aspect in ASPECTS:
            for option in aspect.options:
                self.assertLessEqual(set(option.apart), {*OPTION_TABLE, *of_pytest}, option.field)

    def test_an_aspect_without_a_variable_costs_a_test_nothing(self):
        names = {aspect.name for aspect in in_force(ASPECTS)}
        self.assertNotIn("world", names)
        self.assertIn("addresses", names)
        with mock.patch.dict(os.environ, {SIZE.name: "2"}):
            self.assertEqual({aspect.name for aspect in in_force(ASPECTS)} - names, {"world"})


class TableTest(unittest.TestCase):
    """The page shows the gaps that the code has."""

    def test_of_the_page(self):
        page = PAGE.read_text(encoding="utf-8")
        section = page.partition("### What a host cannot have")[2].partition("\n#")[0]
        rows = re.findall(r"^\| ([a-z ]+) \| ([^|]+) \| ([^|]+) \|$", section, re.M)
        shown = {
            (aspect, host.strip().replace("`", "")): why.strip() for aspect, host, why in rows if aspect != "aspect"
        }
        real = {
            (aspect.name, kind.value.replace("`", "")): why for aspect in ASPECTS for kind, why in aspect.gaps.items()
        }
        self.assertEqual(shown, real)


class PretendedHost(Host):
    """Ranks of which only the order of events counts."""

    kind = HostKind.FRESH

    def __init__(self, events, fails_in=""):
        self.events = events
        self.fails_in = fails_in

    def note(self, event):
        self.events.append(event)
        if event == self.fails_in:
            raise ValueError(event)

    def start(self, attempt):
        attempt.resources.callback(self.events.append, "given back")
        attempt.equip()
        self.note("start")

    def judge(self, attempt):
        self.note("judge")
        return RanksEnd((), Verdict(TestOutcome.PASSED))

    def complete(self, attempt, end):
        self.note("complete")
        return end

    def release(self, attempt):
        self.events.append("release")


class NotedAspect(Aspect):
    """An aspect that notes when it is asked."""

    name = "noted"

    def __init__(self, host, which):
        self.host = host
        self.which = which

    def check(self, host, plan):
        self.host.note(f"check {self.which}")
        return plan

    def prepare(self, attempt):
        self.host.note(f"prepare {self.which}")

    def equip(self, attempt):
        self.host.note(f"equip {self.which}")

    def finish(self, attempt, end):
        self.host.note(f"finish {self.which}")
        return end


class RemarksTest(unittest.TestCase):
    """What others say of a failure is in its message, whatever the host."""

    def test_a_source_is_asked_at_the_end(self):
        own = Remarks()
        own.add(lambda reports, expected, verdict: f"a remark on {len(reports)} ranks that {verdict.outcome.value}")
        with mock.patch.object(session, "ASPECTS", (*ASPECTS, own)):
            for kind in (HostKind.FRESH, HostKind.KEPT, HostKind.THREADS, HostKind.INHERITING):
                with self.subTest(host=kind.name):
                    self.assertIn("a remark on 2 ranks that", run_kind(kind, "fails").message)


class RunsOfATest(unittest.TestCase):
    """A test that runs several times, as in a sweep."""

    def test_the_warnings_of_every_run_are_told_once(self):
        told = set()
        texts = []
        for own in (("first",), ("first", "second"), ("third",)):
            attempt = RankAttempt(PretendedHost([]), TestPlan(Case("a test"), 1), (), variation=own, told=told)
            account = RankAccount(
                RankEnding.PASSED,
                0.0,
                1.0,
                warnings=tuple(OwnWarning(text, "builtins.UserWarning", "x.py", 1) for text in own),
            )
            end = RanksEnd((RankReport(0, RankEnding.PASSED, account=account),), Verdict(TestOutcome.PASSED))
            with warnings.catch_warnings(record=True) as seen:
                WARNINGS.finish(attempt, end)
            texts.append([str(warning.message) for warning in seen])
        self.assertEqual(texts, [["first"], ["second"], ["third"]])


class OrderTest(unittest.TestCase):
    """The one way of a test through its ranks."""

    def events_of(self, fails_in=""):
        events = []
        host = PretendedHost(events, fails_in)
        plan = TestPlan(Case("a test"), WORLD_SIZE)
        with mock.patch.object(session, "ASPECTS", (NotedAspect(host, 1), NotedAspect(host, 2))):
            if fails_in:
                with self.assertRaisesRegex(ValueError, fails_in):
                    session.run(host, plan)
            else:
                session.run(host, plan)
        return events

    def test_aspects_prepare_in_order_and_finish_backwards(self):
        expected = ["check 1", "check 2", "prepare 1", "prepare 2", "equip 1", "equip 2", "start", "judge"]
        expected += ["finish 2", "finish 1", "complete", "release", "given back"]
        self.assertEqual(self.events_of(), expected)

    def test_everything_is_given_back_wherever_it_fails(self):
        for fails_in in ("prepare 2", "equip 1", "start", "judge", "finish 2", "complete"):
            with self.subTest(fails_in):
                events = self.events_of(fails_in)
                self.assertEqual(events.count("release"), 1)
                self.assertEqual(events.count("given back"), int(not fails_in.startswith("prepare")))
        self.assertEqual(self.events_of("check 2"), ["check 1", "check 2"])


if __name__ == "__main__":
    run_tests()

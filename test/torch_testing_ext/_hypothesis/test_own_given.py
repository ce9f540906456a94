"""Hypothesis's own `given` in classes with ranks: all ranks get the same examples, in each runner."""

import unittest
from pathlib import Path

import own_given_subject as subject
import pytest
from kit.files import FolderCase
from kit.outcomes import outcome_of
from kit.pytest_runs import run_pytest
from kit.runs import RunsCase

from torch_testing_ext._collectives.failure import WHOLE_ACCOUNT
from torch_testing_ext.common_utils import run_tests

SOURCE = Path(subject.__file__).read_text()
SMALLEST = "test_fails(n=17) fails on "
HIDDEN = "TypeError: a decorator of test_hidden hides its @given"


def names_of(cls):
    return unittest.TestLoader().getTestCaseNames(cls)


SOUND = {f"{cls.__name__}.{name}" for cls in (subject.SoundTest, subject.InheritedTest) for name in names_of(cls)}
SOUND.add("OfDTensorTest.test_below_with_comms")
# Two ranks do for a runner: `test_all_sound_properties` has those of three.
IN_RUNNERS = {name for name in SOUND if not name.startswith(subject.InheritedTest.__name__)}
NOT_THREE = ("-k", f"not {subject.InheritedTest.__name__}")
FAILING = ("FailingTest.test_fails", "FailingOfDTensorTest.test_fails")


class OwnGivenTest(unittest.TestCase):
    def assert_sound(self, *names):
        for name in names:
            cls, _, method = name.partition(".")
            with self.subTest(name):
                self.assertEqual(outcome_of(getattr(subject, cls)(method)), ("passed", ""))

    def test_sound_properties(self):
        self.assertEqual(len(SOUND), 2 * 9 + 1)
        self.assert_sound("SoundTest.test_settings_above", "SoundTest.test_of_a_mixin", "SoundTest.test_a_helper")

    @pytest.mark.slow
    def test_all_sound_properties(self):
        self.assert_sound(*sorted(SOUND))

    def test_the_smallest_example_that_fails_is_told_once(self):
        for name in FAILING:
            with self.subTest(name):
                seen = outcome_of(getattr(subject, name.partition(".")[0])("test_fails"))
                screen = seen.message.partition("common_distributed.Rank")[2].partition(WHOLE_ACCOUNT)[0]
                self.assertIn(SMALLEST, screen.partition("\n")[0], seen.message)
                self.assertEqual(screen.count(SMALLEST), 1, screen)

    def test_a_decorator_that_hides_it(self):
        self.assertIn(HIDDEN, outcome_of(subject.HiddenTest("test_hidden")).message)

    def test_outside_of_ranks_it_is_hypothesis_alone(self):
        seen = []

        class Plain(subject.OfMixin, unittest.TestCase):
            def check(self, n):
                seen.append(n)

        self.assertEqual(outcome_of(Plain("test_of_a_mixin")), ("passed", ""))
        self.assertEqual(len(seen), 10)


@pytest.mark.slow
class InPytestTest(FolderCase):
    def test_outcomes(self):
        run = run_pytest({"test_x.py": SOURCE}, *NOT_THREE)
        failed = {name: run.outcomes[name] for name in run.outcomes if run.outcomes[name] != "passed"}
        self.assertEqual(set(failed), {*FAILING, "HiddenTest.test_hidden"}, run.text)
        self.assertEqual(set(run.outcomes) - set(failed), IN_RUNNERS)
        for name in FAILING:
            self.assertIn(SMALLEST, run.messages[name])


@pytest.mark.nightly
class InTorchtestTest(RunsCase):
    def test_outcomes(self):
        self.write("test/test_x.py", SOURCE)
        console = self.finish(self.start("--results=results.json", "-j2", *NOT_THREE), 1)
        outcomes = self.outcomes()
        failed = {name for name, outcome in outcomes.items() if outcome != "passed"}
        self.assertEqual(failed, {name.partition(".")[2] for name in (*FAILING, "HiddenTest.test_hidden")}, console)
        self.assertEqual(set(outcomes) - failed, {name.partition(".")[2] for name in IN_RUNNERS})
        self.assertIn(SMALLEST, console)


if __name__ == "__main__":
    run_tests()

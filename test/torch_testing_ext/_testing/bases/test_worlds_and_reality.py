"""The same programs in a whole world and in ranks that communicate, under the sanitizer: the verdicts are the same.

The programs are those of the property suites, and random ones, each by its number. Most get a fault in one rank.
"""

import random
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from torch_testing_ext.common_distributed import RankError, RankFailure, requires_gloo, sanitize
from torch_testing_ext.common_utils import TestCase, run_tests
from torch_testing_ext.ranks import spawn
from torch_testing_ext.worlds import check_world

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "distributed" / "properties"))
import c10d_examples
import collective_programs as programs
import spmd_examples
import spmd_truth

FAULTS = ("drop", "shape", "type", "root", "order", "group")
# Before torch 2.12, gloo has no all_to_all of lists.
INSTEAD = {"all_to_all": "all_gather"} if torch.__version__ < (2, 12) else {}


def draw(numbers, size):
    """Random steps, each with the number of its group."""
    steps = []
    for _ in range(numbers.randrange(2, 5)):
        op = numbers.choice(programs.OPS)
        op = INSTEAD.get(op, op)
        fields = {"is_async": op != "send_recv" and numbers.random() < 0.5}
        if op != "barrier":
            fields["dtype"] = numbers.choice((torch.float32, torch.int64, torch.float64))
        if op in programs.ROOTED:
            fields["root"] = numbers.randrange(size)
        if op in programs.REDUCING:
            fields["reduce"] = numbers.choice(sorted(programs.REDUCTIONS))
        if op == "all_to_all_single" and numbers.random() < 0.5:
            fields["sizes"] = tuple(tuple(numbers.randrange(4) for _ in range(size)) for _ in range(size))
        steps.append((programs.Step(op, numbers.choice([1, 2, 3, 5]), **fields), numbers.randrange(2)))
    return steps


def with_fault(numbers, fault, steps, size):
    """The steps as one rank has them. Some faults change nothing: a barrier has no root."""
    steps = list(steps)
    at = numbers.randrange(len(steps) - (fault == "order"))
    step, group = steps[at]
    if fault == "drop":
        del steps[at]
    elif fault == "order":
        steps[at : at + 2] = steps[at : at + 2][::-1]
    elif fault == "group":
        steps[at] = step, 1 - group
    else:
        other = torch.float32 if step.dtype == torch.float64 else torch.float64
        changes = {
            "shape": {"size": step.size + 1, "sizes": ()},
            "type": {"dtype": other},
            "root": {"root": (step.root + 1) % size},
        }
        steps[at] = replace(step, **changes[fault]), group
    return steps


def run_steps(rank, size, steps_of):
    groups = [dist.group.WORLD, dist.new_group(list(range(size)))]
    unfinished = []
    for number, (step, group) in enumerate(steps_of[rank]):
        finish = programs.start(step, number, groups[group], "cpu")
        if step.is_async:
            unfinished.append(finish)
        else:
            finish()
    for finish in unfinished:
        finish()


def run_program(rank, size, program):
    program.run()


def run_in_groups(rank, size, partition, by_size):
    """`partition`: lists of ranks; `by_size`: the program of each size of a group."""
    for ranks in partition:
        group = dist.new_group(list(ranks))
        if rank in ranks:
            by_size[len(ranks)].run(group)
    # Rank 0 has the store that the others need until then.
    dist.barrier()


def train(rank, size, recipe, fault=None):
    training = spmd_truth.reference_of(recipe)(recipe, rank)
    calls = len(recipe.sizes) - (fault == "drop" and rank == 1)
    for number in range(calls):
        training.call(number)
    if fault == "type" and rank == 1:
        # As many bytes: with others, gloo raises or not, as the ranks' messages come.
        dist.all_reduce(torch.ones(1, dtype=torch.int32))
    elif fault is not None:
        dist.all_reduce(torch.ones(1))


@requires_gloo()
class Case(TestCase):
    def same(self, function, size, *args):
        """Run a program both ways, and return the verdict: None, RankFailure or RankError."""

        @sanitize("default")
        def real(rank):
            dist.init_process_group("gloo")
            function(rank, size, *args)

        world = partial(check_world, function, size, *args)
        verdicts, texts = [], []
        for run in (world, partial(spawn, real, world_size=size, timeout=60)):
            verdict, text = None, ""
            try:
                run()
            except (RankError, RankFailure) as error:
                verdict, text = type(error), str(error)
            verdicts.append(verdict)
            texts.append(text)
        self.assertEqual(verdicts[0], verdicts[1], "\n\n".join([repr(args), *texts]))
        return verdicts[0]

    def of_number(self, number, fault=None):
        """The verdict on a random program, which has a fault in one rank; and whether the fault changes it."""
        numbers = random.Random(number)
        size = numbers.choice([2, 3, 4])
        steps = draw(numbers, size)
        steps_of = [steps] * size
        if fault is not None:
            steps_of[numbers.randrange(size)] = with_fault(numbers, fault, steps, size)
        return self.same(run_steps, size, steps_of)


class RandomProgramsTest(Case):
    """One program of each kind."""

    def test_sound(self):
        self.assertIsNone(self.of_number(7))

    def test_a_dropped_call(self):
        self.assertIs(self.of_number(8, "drop"), RankError)

    def test_another_shape(self):
        self.assertIs(self.of_number(9, "shape"), RankFailure)

    def test_another_type(self):
        self.assertIs(self.of_number(3, "type"), RankFailure)

    def test_another_root(self):
        self.assertIs(self.of_number(11, "root"), RankFailure)

    def test_another_order(self):
        self.assertIs(self.of_number(5, "order"), RankFailure)

    def test_another_group(self):
        self.assertIs(self.of_number(6, "group"), RankError)


@pytest.mark.nightly
class ManyRandomProgramsTest(Case):
    def test_forty(self):
        verdicts = [self.of_number(number, (None, *FAULTS)[number % 7]) for number in range(100, 142)]
        for verdict in (None, RankFailure, RankError):
            self.assertGreaterEqual(verdicts.count(verdict), 5)


@pytest.mark.nightly
class SuitesTest(Case):
    """The programs of the property suites, all of which are sound as they are."""

    def test_over_the_world(self):
        for title, values in c10d_examples.OVER_THE_WORLD:
            self.assertIsNone(self.same(run_program, 4, values["program"]), title)

    def test_in_groups(self):
        for title, values in c10d_examples.IN_GROUPS:
            verdict = self.same(run_in_groups, 4, values["partition"].blocks, values["programs"])
            self.assertIsNone(verdict, title)

    def test_training(self):
        for fault, verdict in ((None, None), ("drop", RankFailure), ("type", RankFailure)):
            # The first and the last end with errors of DDP and of batch norm on two ranks.
            for title, values in spmd_examples.OF_THE_MAINSTREAM[1:3]:
                self.assertIs(self.same(train, 2, values["recipe"], fault), verdict, title)


if __name__ == "__main__":
    run_tests()

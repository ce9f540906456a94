"""Compare every collective of gloo with a model in plain Python: sizes, roots, reductions, layouts, groups, orders."""

import c10d_examples as examples
import torch
from collective_programs import Program, collective_programs
from hypothesis import strategies as st

from torch_testing_ext.common_distributed import MultiProcessTestCase, requires_gloo
from torch_testing_ext.common_utils import run_tests
from torch_testing_ext.hypothesis_utils import (
    given,
    partitions,
    per_rank,
    replay,
    settings,
)

PROFILE = settings(max_examples=60, database=None, derandomize=True)
# The groups of a partition differ in size, and each needs a program for its size.
SIZES = (1, 2, 3, 4)
PROGRAMS_BY_SIZE = st.tuples(*[collective_programs(3, size=size) for size in SIZES]).map(
    lambda programs: dict(zip(SIZES, programs, strict=True))
)


# Before torch 2.12, gloo has no all_to_all of lists.
OLD = torch.__version__ < (2, 12)


def supported(program):
    """Return a program without the steps that gloo does not support."""
    return Program(tuple(step for step in program.steps if step.op != "all_to_all")) if OLD else program


def lists(tensors):
    return [tensor.tolist() for tensor in tensors]


@requires_gloo()
class TestCollectives(MultiProcessTestCase):
    world_size = 4

    def setUp(self):
        super().setUp()
        self._spawn_processes()

    @PROFILE
    @replay(examples.OVER_THE_WORLD)
    @given(program=collective_programs())
    def test_programs_over_the_world(self, program):
        program = supported(program)
        got = [lists(step) for step in program.run()]
        self.assertEqual(got, program.expected(self.rank, self.world_size))

    @PROFILE
    @replay(examples.IN_GROUPS)
    @given(partition=partitions(), programs=PROGRAMS_BY_SIZE)
    def test_programs_in_every_group_of_a_partition(self, partition, programs):
        program, members = supported(programs[len(partition.members)]), partition.members
        got = [lists(step) for step in program.run(partition.mine)]
        self.assertEqual(got, program.expected(members.index(self.rank), len(members)))

    @PROFILE
    @replay(examples.OBJECTS)
    @given(size=st.sampled_from([0, 1, 2, 5]), mine=per_rank(st.integers(-5, 5)))
    def test_objects_of_each_rank_reach_every_rank(self, size, mine):
        import torch.distributed as dist

        gathered = [None] * self.world_size
        dist.all_gather_object(gathered, {"rank": self.rank, "values": [mine] * size})
        self.assertEqual([item["rank"] for item in gathered], list(range(self.world_size)))
        self.assertEqual(gathered[self.rank]["values"], [mine] * size)


if __name__ == "__main__":
    run_tests()

"""Compare functional collectives with their gradients, and groups with options, with a model of all ranks in one."""

import functional_collectives_examples as examples
import torch
import torch.distributed as dist
from functional_calls import OLD, REDUCTIONS, Call, GroupOptions
from hypothesis import assume, strategies as st
from torch.distributed.device_mesh import DeviceMesh

from torch_testing_ext.common_distributed import MultiProcessTestCase, requires_gloo
from torch_testing_ext.common_utils import run_tests
from torch_testing_ext.hypothesis_utils import given, partitions, replay, settings

PROFILE = settings(max_examples=60, database=None, derandomize=True)
RANKS = 3


def calls(*ops, reductions=tuple(REDUCTIONS), dims=(0, 1, -1)):
    row = st.tuples(*[st.integers(0, 2)] * RANKS)
    return st.builds(
        Call,
        op=st.sampled_from(ops),
        shape=st.tuples(*[st.sampled_from([1, 2, 3, 0])] * 2),
        dim=st.sampled_from(dims),
        reduce=st.sampled_from(reductions),
        root=st.integers(0, RANKS - 1),
        splits=st.tuples(*[row] * RANKS),
        transposed=st.booleans(),
    )


# The ways to name a group.
WAYS = {
    "group": lambda group: group,
    "name": lambda group: group.group_name,
    "mesh": lambda group: DeviceMesh.from_group(group, "cpu"),
    "ranks": dist.get_process_group_ranks,
}


@requires_gloo()
class TestFunctionalCollectives(MultiProcessTestCase):
    world_size = RANKS

    def setUp(self):
        super().setUp()
        self._spawn_processes()

    @PROFILE
    @replay(examples.RESULTS)
    @given(
        partition=partitions(),
        call=calls("all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast", "permute"),
        way=st.sampled_from(sorted(WAYS)),
    )
    def test_results(self, partition, call, way):
        assume(not (call.op == "permute" and way == "name"))  # docs/found/permute_by_group_name.py
        rank, size = partition.members.index(self.rank), len(partition.members)
        inputs = [call.input(one, size) for one in range(size)]
        mine = inputs[rank].clone(memory_format=torch.preserve_format)
        got = call.run(mine, WAYS[way](partition.mine), rank, size)
        self.assertEqual(got + 0, call.expected(inputs)[rank])
        self.assertEqual(mine, inputs[rank], msg="the input")

    @PROFILE
    @replay(examples.COALESCED)
    @given(
        partition=partitions(),
        call=calls("all_reduce", "reduce_scatter", "all_gather", dims=(0,)),
        count=st.integers(1, 3),
    )
    def test_coalesced(self, partition, call, count):
        rank, size = partition.members.index(self.rank), len(partition.members)
        inputs = [[call.input(one, size, number) for number in range(count)] for one in range(size)]
        got = call.run_coalesced([one.clone() for one in inputs[rank]], partition.mine)
        wanted = [call.expected(list(column))[rank] for column in zip(*inputs, strict=True)]
        self.assertEqual([one + 0 for one in got], wanted)

    @PROFILE
    @replay(examples.GRADIENTS)
    @given(
        partition=partitions(),
        call=calls(*["all_reduce"][OLD:], "reduce_scatter", "all_gather", "all_to_all", reductions=["sum"]),
    )
    def test_gradients(self, partition, call):
        """The gradient is that of a loss which all members add up."""
        rank, size = partition.members.index(self.rank), len(partition.members)
        inputs = [call.input(one, size).requires_grad_() for one in range(size)]
        outputs = call.expected(inputs)
        weights = [
            (torch.arange(one.numel(), dtype=torch.double) % 5 + number + 1).reshape(one.shape)
            for number, one in enumerate(outputs)
        ]
        sum((one * weight).sum() for one, weight in zip(outputs, weights, strict=True)).backward()
        mine = call.input(rank, size).requires_grad_()
        (call.run(mine, partition.mine, rank, size) * weights[rank]).sum().backward()
        self.assertEqual(mine.grad, inputs[rank].grad)


GROUP_OPTIONS = st.builds(
    GroupOptions,
    ranks=st.lists(st.integers(0, RANKS - 1), unique=True, min_size=1).map(tuple),
    description=st.sampled_from([None, "a group"]),
    sort=st.booleans(),
)


@requires_gloo()
class TestGroups(MultiProcessTestCase):
    world_size = RANKS

    def setUp(self):
        super().setUp()
        self._spawn_processes()

    @PROFILE
    @replay(examples.GROUPS)
    @given(plans=st.lists(GROUP_OPTIONS, min_size=1, max_size=3), root=st.integers(0, RANKS - 1))
    def test_groups_with_options(self, plans, root):
        groups = [plan.create() for plan in plans]
        for plan, group in zip(plans, groups, strict=True):
            if self.rank not in plan.ranks:
                self.assertEqual(dist.get_rank(group), -1)
                continue
            members = plan.members
            me = members.index(self.rank)
            self.assertEqual(dist.get_process_group_ranks(group), members)
            self.assertEqual((dist.get_rank(group), dist.get_world_size(group)), (me, len(members)))
            self.assertEqual([dist.get_group_rank(group, one) for one in members], list(range(len(members))))
            self.assertEqual([dist.get_global_rank(group, one) for one in range(len(members))], members)
            if plan.description:
                self.assertEqual(group.group_desc, plan.description)
            value = torch.tensor([self.rank])
            dist.broadcast(value, group=group, group_src=root % len(members))
            gathered = [torch.zeros_like(value) for _ in members]
            dist.all_gather(gathered, torch.tensor([self.rank]), group=group)
            self.assertEqual((value.item(), [one.item() for one in gathered]), (members[root % len(members)], members))
        for group in groups:
            if group is not dist.GroupMember.NON_GROUP_MEMBER:
                dist.destroy_process_group(group)


if __name__ == "__main__":
    run_tests()

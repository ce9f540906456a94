import os
import sys

import pytest
import torch
import torch.distributed as dist

from torch_testing_ext.common_distributed import DistributedTestBase, MultiProcContinuousTest, collectives_may_differ
from torch_testing_ext.ranks import spawn


def rank():
    return int(os.environ["RANK"])


def add_up():
    tensor = torch.ones(1)
    dist.all_reduce(tensor)
    assert tensor.item() == 2


def disagree():
    # gloo reduces four bytes of each rank, whatever they mean
    dist.all_reduce(torch.ones(1, dtype=[torch.float32, torch.int32][rank()]))


with open(f"processes{rank() if 'RANK' in os.environ else ''}", "a") as file:
    file.write(f"{os.getpid()}\n")


class ProcessesTest(DistributedTestBase):
    world_size = 2

    def test_passes(self):
        self.create_pg("cpu")
        add_up()
        self.assertEqual(self.rank, rank())

    def test_by_env(self):
        dist.init_process_group("gloo")
        add_up()

    def test_disagrees(self):
        self.create_pg("cpu")
        disagree()

    @collectives_may_differ("to test the mark")
    def test_disagrees_on_purpose(self):
        self.create_pg("cpu")
        disagree()

    def test_fails(self):
        self.create_pg("cpu")
        self.assertEqual(self.rank, 0, "in one rank")
        dist.barrier()

    def test_skips(self):
        self.skipTest("in all ranks")

    def test_forked_child_runs_on(self):
        if os.fork() == 0:
            return
        os.wait()
        self.assertEqual(self.rank, 0)

    def test_skips_in_one(self):
        if self.rank:
            self.skipTest("in one rank")


class ThreeTest(DistributedTestBase):
    world_size = 3

    def test_size(self):
        raise AssertionError("it runs")


class PersistentTest(MultiProcContinuousTest):
    world_size = 2

    def test_passes(self):
        add_up()

    def test_fails(self):
        self.assertEqual(self.rank, 0)

    def test_passes_again(self):
        add_up()


@pytest.mark.world_size(2)
class TestMarked:
    def test_passes(self, dist_env):
        add_up()
        assert dist_env.rank == rank()

    def test_disagrees(self, dist_env):
        disagree()

    @collectives_may_differ("to test the mark")
    def test_disagrees_on_purpose(self, dist_env):
        disagree()

    def test_by_env(self):
        dist.init_process_group("gloo")
        add_up()

    def test_fails(self, dist_env):
        print("printed in rank", rank())
        assert dist_env.rank == 0
        dist.barrier()

    def test_skips(self):
        pytest.skip("in all ranks")

    def test_skips_in_one(self):
        if rank():
            pytest.skip("in one rank")

    @pytest.mark.xfail(raises=ValueError)
    def test_xfail(self, dist_env):
        if rank():
            raise ValueError("as expected")
        dist.barrier()

    @pytest.mark.parametrize("number", range(12))
    def test_leaves_when_peers_may_still_connect(self, number, dist_env): ...

    def test_strict_xfail_added_in_the_body(self, request):
        request.node.add_marker(pytest.mark.xfail(strict=True))

    @pytest.mark.parametrize("value", [rank() if "RANK" in os.environ else 0])
    def test_depends_on_the_rank(self, value): ...

    def test_after_it(self): ...

    def test_forked_child_runs_on(self):
        if os.fork() == 0:
            return
        os.wait()
        assert rank() == 0

    def test_exits(self):
        if rank():
            sys.exit(0)


@pytest.mark.world_size([2, 3])
def test_sizes(): ...


def test_spawn():
    spawn(print, 2)


def test_plain():
    assert rank() == 0, "plain test in rank 1"


def test_plain_in_all():
    assert False, "plain test in all ranks"

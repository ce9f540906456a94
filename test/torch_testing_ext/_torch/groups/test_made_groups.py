"""The log of groups, and what it says of their time-outs and works."""

from datetime import timedelta

import torch
import torch.distributed as dist
from kit.own_process import in_own_process
from kit.plain_groups import two_groups, world_of_one

from torch_testing_ext._torch.groups import made_groups
from torch_testing_ext._torch.groups.made_groups import MadeGroup


def group(name="0", timeout=30.0, backend=""):
    return MadeGroup(name, "default_pg", (0, 1), 0, "29500", 5, backend, timeout)


def test_fields():
    assert group().fields == ("0", "default_pg", (0, 1), 0, "29500", False, 5)


@in_own_process
def test_log():
    made_groups.noted_groups[:] = [group()]
    copy = made_groups.made_groups()
    copy.clear()
    assert made_groups.count_of_groups() == 1 and made_groups.made_groups() == [group()]
    assert made_groups.group_in_creation() is None
    made_groups.groups_in_creation[:] = [group("1"), group("2")]
    assert made_groups.group_in_creation() == group("2")


@in_own_process
def test_living_groups():
    world_of_one()
    first, second = dist.new_group([0]), dist.new_group([0])
    made_groups.numbers_of_groups.update({dist.group.WORLD: 0, first: 1, second: 2})
    dist.destroy_process_group(first)
    assert made_groups.living_groups() == [0, 2]
    assert made_groups.number_of_group(second) == 2 and made_groups.number_of_group(object) is None


@in_own_process
def test_timeouts_of_stores():
    """The shortest counts: that of a store, of the wait itself, or of a group that is being made."""
    store = dist.HashStore()
    assert made_groups.timeout_of_store([store]) == store.timeout.total_seconds()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    store.set_timeout(timedelta(seconds=90))
    assert made_groups.timeout_of_store(None) is None
    assert made_groups.timeout_of_store(["no store"]) == 90
    other = dist.HashStore()
    other.set_timeout(timedelta(seconds=7))
    assert made_groups.timeout_of_store([other, "no store"]) == 7
    assert made_groups.timeout_of_store([other], 3.0) == 3
    made_groups.groups_in_creation.append(group(timeout=2.0))
    assert made_groups.timeout_of_store(None) == 2
    assert made_groups.timeout_of_store([other], 3.0) == 2


@in_own_process
def test_timeout_of_a_group_of_gloo_that_is_being_made():
    """Longer than that of its store, which gloo does not heed; a wait that the program asks for still counts."""
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    store.set_timeout(timedelta(seconds=90))
    made_groups.groups_in_creation.append(group(timeout=1800.0, backend="gloo"))
    assert made_groups.timeout_of_store(None) == 1800
    assert made_groups.timeout_of_store([store]) == 90
    made_groups.groups_in_creation.append(group(timeout=1800.0, backend="cpu:gloo,cuda:nccl"))
    assert made_groups.timeout_of_store(None) == 90


@in_own_process
def test_timeouts_of_groups():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=timedelta(seconds=50))
    assert made_groups.timeout_of_group(dist.group.WORLD) == 50
    assert made_groups.timeout_of_group(dist.new_group([0], timeout=timedelta(seconds=20))) == 20
    assert made_groups.timeout_of_group(object()) is None


@in_own_process
def test_works_of_collectives():
    groups, message = two_groups(), [torch.ones(1)]
    works = [groups[0].send(message, 1, 5), groups[1].recv(message, 0, 5)]
    works += [groups[1].send(message, 0, 5), groups[0].recv_anysource(message, 5)]
    assert not any(made_groups.is_of_collective(work) for work in works)
    collectives = [group.allreduce([torch.ones(1)]) for group in groups]
    assert all(made_groups.is_of_collective(work) for work in collectives)
    for work in (*works, *collectives):
        work.wait()

    class Own(dist.Work):
        pass

    assert not made_groups.is_of_collective(Own()) and not made_groups.is_of_collective(None)

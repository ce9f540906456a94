"""The roots of a group's calls are noted, with the moments between which they were issued."""

import pickle
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from kit.own_process import error_of, in_own_process

from torch_testing_ext._torch.groups import made_groups, roots_of_calls


def watched():
    """A group of one rank whose calls are watched."""
    roots_of_calls.watch_roots()
    group = dist.ProcessGroup(dist.HashStore(), 0, 1)
    gloo = dist.ProcessGroupGloo(dist.HashStore(), 0, 1, timedelta(seconds=10))
    group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
    group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, gloo)
    made_groups.numbers_of_groups[group] = 3
    return group


def noted():
    return [root for _, data in roots_of_calls.dump() for root in pickle.loads(data)["roots"]]


@in_own_process
def test_roots():
    """In each form of the methods."""
    group, tensor = watched(), torch.ones(2)
    options = dist.BroadcastOptions()
    options.rootRank = 0
    before = time.time_ns()
    group.broadcast([tensor], options).wait()
    group.broadcast([tensor], opts=options).wait()
    group.broadcast(tensor, 0).wait()
    group.broadcast(tensor, root=0).wait()
    group.reduce(tensor, 0, dist.ReduceOp.MAX).wait()
    group.gather([tensor.clone()], tensor, 0).wait()
    group.scatter(tensor, [tensor.clone()], root=0).wait()
    kinds = ["broadcast"] * 4 + ["reduce", "gather", "scatter"]
    assert [tuple(each[:3]) for each in noted()] == [(3, kind, 0) for kind in kinds]
    moments = [before, *(moment for each in noted() for moment in each[3:]), time.time_ns()]
    assert moments == sorted(moments)
    roots_of_calls.forget()
    assert noted() == []


@in_own_process
def test_calls_without_a_known_root():
    """Those of groups that nobody knows, and those whose options have the default."""
    group = watched()
    group.broadcast([torch.ones(1)]).wait()
    made_groups.numbers_of_groups.pop(group)
    group.broadcast(torch.ones(1), 0).wait()
    assert noted() == []


@in_own_process
def test_a_call_that_raises():
    group = watched()
    assert isinstance(error_of(lambda: group.broadcast(torch.ones(1), 0, "soon")), TypeError)
    assert [each[-1] > 0 for each in noted()] == [True]

"""Calls of a backend by a program are told, and those that are part of an operation of c10d are not."""

import tempfile

import torch
import torch.distributed as dist
from kit.own_process import in_own_process
from kit.plain_groups import world_of_one

from torch_testing_ext._torch.operations import backend_calls, operation_hook
from torch_testing_ext._torch.replacing import TABLE

BACKEND = torch._C._distributed_c10d.Backend


def heard_by(heard):
    def on_call(kind, issue):
        heard.append(kind)
        return issue()

    return on_call


def test_every_method_is_replaced():
    (names,) = TABLE["calls of backends"].functions.values()
    assert sorted(names) == sorted(backend_calls.KINDS)


@in_own_process
def test_calls():
    before, heard = BACKEND.allreduce, []
    backend_calls.hooks.tell(heard_by(heard))
    with tempfile.TemporaryDirectory() as folder:
        backend = dist.ProcessGroupGloo(dist.FileStore(f"{folder}/store", 1), 0, 1, dist.default_pg_timeout)
        backend.allreduce([torch.ones(1)]).wait()
        backend.barrier().wait()
        assert heard == ["all_reduce", "barrier"]
        backend_calls.hooks.leave()
        backend.allreduce([torch.ones(1)]).wait()
    assert len(heard) == 2 and BACKEND.allreduce is before


@in_own_process
def test_operations_of_c10d():
    heard = []
    operation_hook.hook.install()
    world_of_one()
    backend_calls.hooks.tell(heard_by(heard))
    dist.all_reduce(torch.ones(1))
    dist.group.WORLD.allreduce([torch.ones(1)]).wait()
    assert heard == []

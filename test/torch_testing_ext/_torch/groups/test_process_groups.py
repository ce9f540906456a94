"""What starting, watching and leaving ranks asks of groups."""

import torch
import torch.distributed as dist
from kit.own_process import in_own_process
from kit.plain_groups import fake_world, world_of_one

from torch_testing_ext._torch.groups import process_groups

# While a file runs, the kit of these tests has it say that there were none.
from torch_testing_ext._torch.groups.process_groups import made_groups_before


@in_own_process
def test_groups_before():
    """Also after they are destroyed. Other files of this process may have made some before."""
    world_of_one()
    assert made_groups_before()
    dist.destroy_process_group()
    assert made_groups_before()


@in_own_process
def test_backends():
    assert process_groups.only_gloo()
    world_of_one()
    assert process_groups.only_gloo()
    dist.new_group([0], backend="cpu:gloo")
    assert process_groups.only_gloo()
    dist.destroy_process_group()
    fake_world()
    assert not process_groups.only_gloo()


@in_own_process
def test_abort():
    world_of_one()
    dist.all_reduce(torch.ones(1))
    process_groups.abort_process_groups()
    assert not dist.is_initialized()


@in_own_process
def test_endless_waits():
    process_groups.wait_without_end()
    world_of_one()
    assert dist.group.WORLD._get_backend(torch.device("cpu")).options._timeout.total_seconds() == 86_400


@in_own_process
def test_store_of_a_launch():
    """Groups that are made by `env://` share it, and find none of its keys."""
    server = process_groups.launcher_store("localhost", 0, True, 5.0)
    port = server.underlying_store.port
    server.set("key", "1")
    again = process_groups.launcher_store("localhost", port, False, 5.0)
    assert again.get("key") == b"1" and again.timeout.total_seconds() == 5
    plain = dist.TCPStore("localhost", port, is_master=True, multi_tenant=True, wait_for_workers=False)
    assert not plain.check(["key"]) and plain.check(["torch_testing_ext" + "/key"])

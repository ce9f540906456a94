"""Tests on pretended nodes: sound ones, and ten that take one machine for granted."""

import os
import platform
import socket
import tempfile
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from torch_testing_ext.common_distributed import MultiProcContinuousTest, MultiProcessTestCase

ON_TWO = pytest.mark.world_size(4, nodes=2, timeout=60)


@ON_TWO
def test_place(dist_env):
    node, local_rank = divmod(dist_env.rank, 2)
    assert (dist_env.node, dist_env.local_rank) == (node, local_rank)
    names = ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "NODE_RANK", "NNODES")
    assert [int(os.environ[name]) for name in names] == [local_rank, 2, node, 2, node, 2]
    assert {socket.gethostname(), platform.node(), os.uname().nodename} == {f"node{node}"}
    address = socket.gethostbyname(f"node{node}")
    places = [None] * 4
    dist.all_gather_object(places, (socket.gethostname(), address, tempfile.gettempdir()))
    assert places[0] == places[1] and places[2] == places[3] and not {*places[0]} & {*places[2]}


@ON_TWO
def test_rendezvous(ranks):
    dist.init_process_group("gloo")
    dist.barrier()


@ON_TWO
def test_memory_of_a_node(dist_env):
    made = SharedMemory(create=True, size=8) if dist_env.local_rank == 0 else None
    names = [None] * 4
    dist.all_gather_object(names, made and made.name)
    own = made or SharedMemory(names[dist_env.node * 2])
    own.buf[dist_env.local_rank] = 7
    dist.barrier()
    assert bytes(own.buf[:2]) == b"\7\7"
    own.close()
    dist.barrier()
    if made:
        made.unlink()
    # Python removes the memory that a process has only opened when that ends, too.
    dist.barrier()


class Fresh(MultiProcessTestCase):
    nodes = 2

    def setUp(self):
        super().setUp()
        self._spawn_processes()

    def test_place(self):
        self.assertEqual((self.local_rank, os.environ["GROUP_RANK"]), (self.rank % 2, str(self.rank // 2)))


class Kept(MultiProcContinuousTest):
    nodes = 2
    world_size = 4

    def test_place(self):
        self.assertEqual((self.local_rank, os.environ["GROUP_RANK"]), (self.rank % 2, str(self.rank // 2)))

    def test_attribute_of_its_own(self):
        self.local_rank = 7
        self.assertEqual(self.local_rank, 7)


# What takes one machine for granted.


@ON_TWO
def test_fault_leader_of_the_world(dist_env):
    file = Path(tempfile.gettempdir(), "vocabulary")
    if dist_env.rank == 0:
        file.write_text("a")
    dist.barrier()
    assert file.exists()


@ON_TWO
def test_fault_file_of_another_node(dist_env):
    name = [None]
    if dist_env.rank == 0:
        name[0] = tempfile.mkstemp()[1]
    dist.broadcast_object_list(name)
    own = Path(tempfile.gettempdir(), Path(name[0]).name)
    assert own.exists()


@ON_TWO
def test_fault_localhost(ranks):
    os.environ["MASTER_ADDR"] = "localhost"
    dist.init_process_group("gloo")


@ON_TWO
def test_fault_shared_memory(dist_env):
    name = [None]
    made = SharedMemory(create=True, size=8) if dist_env.rank == 0 else None
    try:
        name[0] = made and made.name
        dist.broadcast_object_list(name)
        if not made:
            SharedMemory(name[0]).close()
        dist.barrier()
    finally:
        if made:
            made.unlink()
    # Python removes the memory that a process has only opened when that ends, too.
    dist.barrier()


@ON_TWO
def test_fault_local_group_of_global_ranks(dist_env):
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    assert dist.get_rank(groups[dist_env.rank // int(os.environ["WORLD_SIZE"])]) == dist_env.local_rank


@ON_TWO
def test_fault_one_checkpoint_for_all_leaders(dist_env, tmp_path):
    if dist_env.local_rank == 0:
        with open(tmp_path / "checkpoint", "x") as file:
            file.write("weights")
    dist.barrier()


@ON_TWO
def test_fault_local_world_size_as_world_size(dist_env):
    total = torch.ones(())
    dist.all_reduce(total)
    assert total / int(os.environ["LOCAL_WORLD_SIZE"]) == 1


@pytest.mark.world_size(4, nodes=2, devices=4)
def test_devices(dist_env):
    total = torch.ones((), device=dist_env.device)
    dist.all_reduce(total)
    assert total.item() == 4 and torch.accelerator.device_count() == 2


@pytest.mark.world_size(4, nodes=2, devices=4)
def test_fault_device_of_the_rank(dist_env):
    torch.ones((), device=f"{dist_env.device.type}:{dist_env.rank}")


@pytest.mark.world_size(4, nodes=2, devices=4)
def test_fault_devices_as_world_size(dist_env):
    assert torch.accelerator.device_count() == dist.get_world_size()

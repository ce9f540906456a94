"""A manager of replicas: when one dies, the others form a new group and repeat the step, as torchft has it.

Run it: pytest examples/cookbook/test_replica_manager.py
"""

import contextlib
import json
from datetime import timedelta

import torch
import torch.distributed as dist

from torch_testing_ext.common_distributed import MultiProcessTestCase
from torch_testing_ext.faults import call, faults, kill, reached


class Manager:
    """Has a group of the replicas that are alive. `least`: so many must be there."""

    def __init__(self, folder, replica, replicas, least):
        self.folder, self.replica, self.least = folder, replica, least
        self.store = dist.FileStore(f"{folder}.quorum")
        self.number, self.members = 0, list(range(replicas))
        self.join()

    def join(self):
        store = dist.FileStore(f"{self.folder}.{self.number}", len(self.members))
        rank, size = self.members.index(self.replica), len(self.members)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=60))

    def form(self):
        """A new group of those that have noticed the loss; the first of them says who belongs to it."""
        dist.destroy_process_group()
        self.number += 1
        arrived = self.store.add(f"{self.number}.arrived", 1)
        self.store.set(f"{self.number}.{arrived}", str(self.replica))
        if arrived == 1:
            keys = [f"{self.number}.{place}" for place in range(1, self.least + 1)]
            self.store.wait(keys, timedelta(seconds=60))
            members = sorted(int(self.store.get(key)) for key in keys)
            self.store.set(f"{self.number}.members", json.dumps(members))
        self.members = json.loads(self.store.get(f"{self.number}.members"))
        self.join()
        reached("a new group")

    def average(self, gradient):
        """Whether the step may be committed: all replicas of the group have taken part."""
        lost = True
        with contextlib.suppress(RuntimeError):
            dist.all_reduce(gradient)
            lost = False
        # Outside of the `except`: an exception in flight would keep the group, and its connections.
        if lost:
            self.form()
        else:
            gradient /= len(self.members)
        return not lost


class ManagerTest(MultiProcessTestCase):
    world_size = 3

    def setUp(self):
        super().setUp()
        self._spawn_processes()

    @faults(kill(2, at=call(3, "all_reduce")), within=30, must_reach=["a new group"])
    def test_a_step_is_repeated_without_the_dead_replica(self):
        manager = Manager(self.file_name, self.rank, self.world_size, least=2)
        weight, step = torch.zeros(2), 0
        while step < 4:
            gradient = torch.full((2,), float(step + 1))
            if manager.average(gradient):
                weight += gradient
                step += 1
        self.assertEqual(weight.tolist(), [10.0, 10.0])
        self.assertEqual(manager.members, [0, 1])

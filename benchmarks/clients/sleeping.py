"""Tests of a service with slow replicas, as its authors write them: they wait far longer than they compute."""

import time

import torch
import torch.distributed as dist
from torch.testing._internal.common_distributed import MultiProcessTestCase
from torch.testing._internal.common_utils import run_tests


class SlowReplicasTest(MultiProcessTestCase):
    @property
    def world_size(self):
        return 2

    def setUp(self):
        super().setUp()
        self._spawn_processes()

    def start(self):
        store = dist.FileStore(self.file_name, self.world_size)
        dist.init_process_group("gloo", store=store, rank=self.rank, world_size=self.world_size)
        return store

    def reduce_late(self, late_rank):
        self.start()
        if self.rank == late_rank:
            time.sleep(0.5)
        total = torch.ones(4)
        dist.all_reduce(total)
        self.assertEqual(total, torch.full((4,), 2.0))

    def test_first_is_late(self):
        self.reduce_late(0)

    def test_second_is_late(self):
        self.reduce_late(1)

    def test_late_barrier(self):
        self.start()
        time.sleep(0.3 * self.rank)
        dist.barrier()

    def test_late_message(self):
        self.start()
        message = torch.zeros(3)
        if self.rank == 0:
            time.sleep(0.5)
            dist.send(torch.arange(3.0), 1)
        else:
            dist.recv(message, 0)
            self.assertEqual(message, torch.arange(3.0))

    def test_retries(self):
        self.start()
        for attempt in range(5):
            time.sleep(0.1)
            answer = torch.tensor([float(attempt)])
            dist.broadcast(answer, src=attempt % 2)
            self.assertEqual(answer.item(), attempt)

    def test_heartbeats(self):
        store = self.start()
        for beat in range(5):
            store.set(f"{beat}/{self.rank}", str(beat))
            time.sleep(0.1)
            store.wait([f"{beat}/{1 - self.rank}"])

    def test_late_objects(self):
        self.start()
        time.sleep(0.5 * (1 - self.rank))
        found = [None, None]
        dist.all_gather_object(found, {"rank": self.rank})
        self.assertEqual(found, [{"rank": 0}, {"rank": 1}])


if __name__ == "__main__":
    run_tests()

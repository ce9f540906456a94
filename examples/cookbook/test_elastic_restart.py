"""A worker dies, is started again, dies once more while it loads the checkpoint, and then catches up.

Run it: pytest examples/cookbook/test_elastic_restart.py
"""

import contextlib
import os
from datetime import timedelta

import torch
import torch.distributed as dist

from torch_testing_ext.common_distributed import MultiProcessTestCase
from torch_testing_ext.faults import call, fault_point, faults, kill, mark, reached, restart

STEPS = 4


class Trainer:
    """Trains in one world after another. A checkpoint replaces the last one when it is whole."""

    def __init__(self, folder, rank):
        self.checkpoint, self.folder, self.rank = f"{folder}.checkpoint", folder, rank
        self.weight, self.step, self.worlds = torch.zeros(2), 0, 0

    def load(self):
        if os.path.exists(self.checkpoint):
            fault_point("loading")
            self.step, self.weight = torch.load(self.checkpoint)
            reached("loaded")

    def save(self):
        if self.rank == 0:
            torch.save((self.step, self.weight), f"{self.checkpoint}.new")
            os.replace(f"{self.checkpoint}.new", self.checkpoint)
        # Nobody goes on without the checkpoint.
        dist.barrier()

    def join(self, world):
        store = dist.FileStore(f"{self.folder}.{world}", 2)
        dist.init_process_group("gloo", store=store, rank=self.rank, world_size=2, timeout=timedelta(seconds=60))

    def train(self):
        """Whether all steps are done: False if a peer was lost."""
        with contextlib.suppress(RuntimeError):
            while self.step < STEPS:
                gradient = torch.ones(2)
                dist.all_reduce(gradient)
                self.weight, self.step = self.weight + gradient, self.step + 1
                self.save()
            return True
        return False


class ElasticTest(MultiProcessTestCase):
    world_size = 2

    def setUp(self):
        super().setUp()
        self._spawn_processes()

    @faults(
        kill(1, at=call(3, "all_reduce")),
        kill(1, at=mark("loading", incarnation=1)),
        restart(1, times=2),
        must_reach=["loaded"],
    )
    def test_a_worker_may_die_again_while_it_recovers(self):
        trainer = Trainer(self.file_name, self.rank)
        trainer.load()
        # A process that was started again joins the world that the survivor opens after the loss.
        world = min(self.incarnation, 1)
        trainer.join(world)
        while not trainer.train():
            dist.destroy_process_group()
            world += 1
            trainer.load()
            trainer.join(world)
        self.assertEqual(trainer.weight.tolist(), [2.0 * STEPS, 2.0 * STEPS])

"""Fake process groups, temporary directories and state dicts, written as in PyTorch's tree."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.common_utils import TestCase, run_tests
from torch.testing._internal.distributed._tensor.common_dtensor import DTensorTestBase, with_comms
from torch.testing._internal.distributed.checkpoint_utils import with_temp_dir
from torch.testing._internal.distributed.common_state_dict import FusionEmbedding, VerifyStateDictMixin
from torch.testing._internal.distributed.distributed_utils import with_dist, with_fake_comms


class TestFake(TestCase):
    @with_fake_comms
    def test_without_arguments(self):
        self.assertEqual((dist.get_rank(), dist.get_world_size()), (0, 2))

    @with_fake_comms(rank=3, world_size=8)
    def test_with_arguments(self):
        self.assertEqual((dist.get_rank(), dist.get_world_size()), (3, 8))

    def test_context(self):
        with with_dist(rank=1, world_size=3):
            self.assertEqual(dist.get_rank(), 1)
        self.assertFalse(dist.is_initialized())

    @with_temp_dir
    def test_directory_without_a_group(self):
        self.assertTrue(os.path.isdir(self.temp_dir))


class TestInRanks(DTensorTestBase, VerifyStateDictMixin):
    @property
    def world_size(self):
        return 2

    @with_comms
    @with_temp_dir
    def test_directory(self):
        with open(os.path.join(self.temp_dir, str(self.rank)), "w"):
            dist.barrier()
        self.assertEqual(sorted(os.listdir(self.temp_dir)), ["0", "1"])
        dist.barrier()

    @with_comms
    def test_state_dicts(self):
        torch.manual_seed(0)
        models = [nn.Linear(4, 4), nn.Linear(4, 4)]
        models[1].load_state_dict(models[0].state_dict())
        fully_shard(models[1], mesh=self.build_device_mesh())
        optimizers = [torch.optim.Adam(model.parameters(), foreach=True) for model in models]
        for model, optimizer in zip(models, optimizers, strict=True):
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
        self._verify_msd(models[0].state_dict(), get_model_state_dict(models[1]))
        full_state = get_optimizer_state_dict(models[1], optimizers[1])
        self._verify_osd(models[0], optimizers[0], optimizers[0].state_dict(), full_state)
        new = torch.optim.Adam(models[0].parameters(), foreach=True)
        self._verify_osd_by_load(models[0], optimizers[0], new, full_state)

    def test_fused(self):
        self.assertEqual(sorted(dict(FusionEmbedding(2, 2, 2).named_parameters()))[0], "embedding.weight")


if __name__ == "__main__":
    run_tests()

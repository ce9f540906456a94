"""ShardedTensorTestBase and its with_comms; with_temp_dir of the checkpoint helpers."""

import os

import torch
import torch.distributed as dist
from notes import note
from torch.distributed import checkpoint
from torch.testing._internal.common_utils import run_tests
from torch.testing._internal.distributed._shard.sharded_tensor import ShardedTensorTestBase, with_comms
from torch.testing._internal.distributed._tensor import common_dtensor
from torch.testing._internal.distributed.checkpoint_utils import with_temp_dir

NEWER = {"ShardedTest.test_unknown": "2.15"}


class ShardedTest(ShardedTensorTestBase):
    @property
    def world_size(self):
        return 2

    @with_comms(init_rpc=False, backend="gloo")
    def test_group(self):
        note(self, dist.get_backend(), dist.get_world_size(), self.rank)

    @with_comms(init_rpc=False, backend="gloo")
    def test_fails(self):
        dist.barrier()
        raise ValueError("with comms")

    @with_comms(init_rpc=False, backend="gloo")
    def test_skips(self):
        self.skipTest("with comms")

    @with_comms(init_rpc=False, backend="nccl")
    def test_nccl(self):
        note(self, "body")

    @with_comms(init_rpc=False, backend="made_up")
    def test_unknown(self):
        note(self, "body")

    def test_by_hand(self):
        self.init_comms(init_rpc=False, backend="gloo")
        note(self, dist.is_initialized())
        self.destroy_comms(destroy_rpc=False)
        note(self, dist.is_initialized())


class DefaultSizeTest(ShardedTensorTestBase):
    def test_four(self):
        note(self, self.world_size)


class TemporaryDirectoryTest(common_dtensor.DTensorTestBase):
    @property
    def world_size(self):
        return 2

    @common_dtensor.with_comms
    @with_temp_dir
    def test_shared(self):
        found = [None, None]
        dist.all_gather_object(found, self.temp_dir)
        note(self, found[0] == found[1])

    @with_temp_dir
    def test_without_group(self):
        note(self, os.path.isdir(self.temp_dir))

    @common_dtensor.with_comms
    @with_temp_dir
    def test_save_and_load(self):
        checkpoint.save({"weight": torch.full((2,), 3.0)}, checkpoint_id=self.temp_dir)
        loaded = {"weight": torch.zeros(2)}
        checkpoint.load(loaded, checkpoint_id=self.temp_dir)
        note(self, loaded["weight"].tolist())

    @common_dtensor.with_comms
    @with_temp_dir
    def test_raises(self):
        dist.barrier()
        raise ValueError("with a directory")


if __name__ == "__main__":
    run_tests()

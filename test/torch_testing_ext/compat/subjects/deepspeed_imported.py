import os

import pytest
import torch.distributed as dist

from torch_testing_ext.compat.deepspeed import DistributedFixture, DistributedTest


def size():
    return int(os.environ["WORLD_SIZE"])


import sys
import types

deepspeed = types.ModuleType("deepspeed")
sys.modules["deepspeed"] = deepspeed


def init_distributed(dist_backend=None, *, timeout=0):
    dist.init_process_group(dist_backend or "gloo")
    deepspeed.has_made = dist_backend


deepspeed.init_distributed = init_distributed


class by_deepspeed(DistributedFixture):
    backend = "gloo"

    def run(self):
        assert deepspeed.has_made == "gloo"


class TestByDeepspeed(DistributedTest):
    def test_made(self, by_deepspeed):
        assert deepspeed.has_made is None and dist.get_world_size() == 2


@pytest.mark.world_size(2, scope="class")
class TestShared(DistributedTest):
    def test_first(self):
        deepspeed.is_shared = True

    def test_second(self):
        assert deepspeed.is_shared


class TestByItself(DistributedTest):
    init = staticmethod(lambda: dist.init_process_group("gloo"))

    def test_made(self):
        assert not hasattr(deepspeed, "has_made")

"""Megatron's way, in miniature: the tests run under torchrun, and make the groups by themselves."""

import os

import torch.distributed as dist
from megatron.core import parallel_state


class Utils:
    rank = int(os.environ.get("LOCAL_RANK", 0))
    world_size = int(os.environ.get("WORLD_SIZE", 1))

    @staticmethod
    def initialize_model_parallel(**sizes):
        if not dist.is_initialized():
            dist.init_process_group("gloo")
        parallel_state.initialize_model_parallel(**sizes)

    @staticmethod
    def destroy_model_parallel():
        dist.barrier()
        parallel_state.destroy_model_parallel()

"""What the example needs of Megatron's model-parallel groups."""

import torch.distributed as dist

_group = None


def initialize_model_parallel(tensor_model_parallel_size=1):
    global _group
    assert tensor_model_parallel_size == dist.get_world_size()
    _group = dist.new_group()


def get_tensor_model_parallel_group():
    return _group


def destroy_model_parallel():
    global _group
    dist.destroy_process_group(_group)
    _group = None

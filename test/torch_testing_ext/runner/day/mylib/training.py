import torch
import torch.distributed as dist


def average(gradient, rank):
    if rank == 1 and gradient.sum() > 0:
        raise ValueError("gradient of rank 1 is not finite")
    dist.all_reduce(gradient)
    return gradient / dist.get_world_size()


def step(rank):
    return average(torch.ones(4), rank)

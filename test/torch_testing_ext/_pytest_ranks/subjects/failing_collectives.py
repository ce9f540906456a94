import torch
import torch.distributed as dist


def reduce_differently():
    dist.all_reduce(torch.ones(4), dist.ReduceOp.MAX if dist.get_rank() else dist.ReduceOp.SUM)


def reduce_nan():
    dist.all_reduce(torch.full((4,), float("nan") if dist.get_rank() else 0.0))


def cross():
    groups = [dist.new_group([0, 1]), dist.new_group([0, 1])]
    works = [dist.all_reduce(torch.ones(4), group=group, async_op=True) for group in groups[:: 1 - 2 * dist.get_rank()]]
    for work in works:
        work.wait()

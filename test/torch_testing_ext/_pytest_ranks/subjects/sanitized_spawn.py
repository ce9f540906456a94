import torch.distributed as dist
from failing_collectives import cross, reduce_differently, reduce_nan

from torch_testing_ext.common_distributed import sanitize
from torch_testing_ext.ranks import spawn


def differently(rank):
    dist.init_process_group("gloo")
    reduce_differently()


@sanitize("nan")
def nan(rank):
    dist.init_process_group("gloo")
    reduce_nan()


def crossed(rank):
    dist.init_process_group("gloo")
    cross()


def test_spawned_op():
    spawn(differently, 2)


def test_spawned_nan():
    spawn(nan, 2)


def test_spawned_crossed():
    spawn(crossed, 2)

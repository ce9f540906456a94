"""vLLM's way, in miniature: a process for each rank, which gets its environment as an argument."""

import os

import processes
import torch.distributed as dist


def distributed_run(fn, world_size, *args):
    processes.run(world_size, lambda rank, port: fn(processes.variables(rank, world_size, port), world_size, *args))


def set_env_vars_and_device(env):
    os.environ.update(env)
    dist.init_process_group("gloo")

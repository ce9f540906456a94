import contextlib
import pickle

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Backend, Work

from torch_testing_ext._torch.groups import flight_recorder, watched_groups
from torch_testing_ext.launch.causes import is_of_lost_peer


class Done(Work):
    def wait(self, timeout=None):
        return True


class Mine(Backend):
    def __init__(self, store, rank, size, timeout):
        super().__init__(rank, size)

    def getBackendName(self):
        return "mine"

    def allreduce(self, tensors, options=None):
        return Done()


dist.Backend.register_backend("mine", Mine, devices=["cpu"])
watched_groups.watch_process_groups(lambda name: contextlib.nullcontext(), is_of_lost_peer)
dist.init_process_group("mine", store=dist.HashStore(), rank=0, world_size=1)
dist.all_reduce(torch.ones(4))
recorded = flight_recorder.recorded_collectives()
dumps = [pickle.loads(data).get("entries", []) for _, data in recorded if data]
names = ("profiling_name", "state", "retired")
print([tuple(entry[name] for name in names) for entries in dumps for entry in entries])

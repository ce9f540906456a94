"""DTensor: scaled_dot_product_attention of sharded tensors on the CPU takes ten seconds and more, even on one rank.

There is no rule for the CPU's kernel, so DTensor traces its decomposition once for every choice of placements of all
arguments. Several operations inside have decompositions of their own, and are traced for every choice again.

Seen on torch 2.13.0 and 2.15.0, where a call took 12 seconds of an idle core and two minutes of a busy one; 2.11.0
refuses it at once. Found by
test/distributed/properties/test_dtensor_opinfo_properties.py.

Run this file: it exits with 1 if the call has not ended after 4 seconds, and shows where it is.
"""

import faulthandler

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

if __name__ == "__main__":
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    mesh = init_device_mesh("cpu", (1,))
    parts = [distribute_tensor(torch.rand(2, 2, 4, 8), mesh, [Shard(0)]) for _ in range(3)]
    faulthandler.dump_traceback_later(4, exit=True)
    try:
        print(torch.nn.functional.scaled_dot_product_attention(*parts).shape)
    except NotImplementedError as error:
        print(error)
    faulthandler.cancel_dump_traceback_later()

"""DTensor: scaled_dot_product_attention of sharded tensors on the CPU takes ten seconds and more, even on one rank.

There is no rule for the CPU's kernel, so DTensor traces its decomposition once for every choice of placements of all
arguments. Several operations inside have decompositions of their own, and are traced for every choice again. One
attention calls more than 100,000 functions of torch.distributed.tensor; a matrix product, which has a rule, some 1,400.

Seen on torch 2.12 to 2.15, where a call took 12 seconds of an idle core and two minutes of a busy one; 2.11.0
refuses it at once. Near: pytorch/pytorch#173988, pytorch/pytorch#182739. Found by
test/distributed/properties/test_dtensor_opinfo_properties.py.

Run this file: it counts the calls of Python functions of torch.distributed.tensor, and exits with 1 at the
100,000th.
"""

import sys
import types
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

MOST = 100_000


class Counter:
    """Counts the calls of functions of torch.distributed.tensor, and ends the program at the last one."""

    calls = 0

    def __call__(self, frame: types.FrameType, event: str, arg: Any) -> None:
        if event == "call" and frame.f_globals.get("__name__", "").startswith("torch.distributed.tensor."):
            self.calls += 1
            if self.calls == MOST:
                sys.setprofile(None)
                print(f"torch calls {MOST} functions for one attention, and has not ended", flush=True)
                sys.exit(1)


def attend() -> None:
    mesh = init_device_mesh("cpu", (1,))
    parts = [distribute_tensor(torch.rand(2, 2, 4, 8), mesh, [Shard(0)]) for _ in range(3)]
    counter = Counter()
    sys.setprofile(counter)
    try:
        print(torch.nn.functional.scaled_dot_product_attention(*parts).shape)
    except NotImplementedError as error:
        print(error)
    finally:
        sys.setprofile(None)
    print(f"{counter.calls} functions were called")


if __name__ == "__main__":
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    attend()

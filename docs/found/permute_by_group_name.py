"""functional collectives: permute_tensor refuses the name of a group, which all others accept.

Seen on torch 2.11 to 2.15. The types of a group, RANK_TYPES, include its name. permute_tensor asks `_expand_group`
for the ranks of the group, and that knows all of these types but the name: "Invalid type for group, must be one of
List, Processgroup, DeviceMesh or (DeviceMesh, int)." patches/0017-functional-permute-by-group-name.patch mends it.
Found by test/distributed/properties/test_functional_collectives_properties.py.

Run this file: it prints what permute_tensor returns, and exits with 1 if that is an error.
"""

import sys

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional


def permute() -> str:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    name = dist.group.WORLD.group_name
    try:
        return f"{functional.permute_tensor(torch.ones(2), [0], name).tolist()}"
    except ValueError as error:
        if "Invalid type for group" not in str(error):
            raise
        return f"error: {error}"
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    result = permute()
    print(result, flush=True)
    sys.exit(result != "[1.0, 1.0]")

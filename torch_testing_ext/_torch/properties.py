"""Property tests."""

from __future__ import annotations

import sys


def abort_process_groups() -> None:
    """End all process groups of this process at once, with whatever is under way in them.

    `_abort_process_group`: 2.6 to 2.15. Backends without an abort (gloo) are left as they are.
    """
    import torch.distributed as dist

    dist.distributed_c10d._abort_process_group()


def forget_meshes() -> None:
    """Forget what DTensor keeps from earlier calls: it holds meshes whose process groups are about to go.

    `torch.distributed.tensor.debug._clear_sharding_prop_cache`, `_redistribute._gen_transform_infos`: 2.11 to 2.15.
    """
    if "torch.distributed.tensor" not in sys.modules:
        return
    from torch.distributed.tensor import _redistribute
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache

    _clear_sharding_prop_cache()
    _redistribute._gen_transform_infos.cache_clear()
    clear_planners = getattr(_redistribute, "clear_redistribute_planner_cache", None)
    if clear_planners is not None:
        clear_planners()

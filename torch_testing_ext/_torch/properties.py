"""Private names of torch that property tests across ranks use."""

from __future__ import annotations

import sys


def abort_process_groups() -> None:
    """Abort all process groups of this process, including the collectives that run in them.

    `_abort_process_group`: 2.6 to 2.15. Backends without an abort (gloo) stay as they are.
    """
    import torch.distributed as dist

    dist.distributed_c10d._abort_process_group()


def forget_meshes() -> None:
    """Clear the caches of DTensor: they hold meshes whose process groups are about to be destroyed.

    `torch.distributed.tensor.debug._clear_sharding_prop_cache`, `_redistribute._gen_transform_infos`: 2.11 to 2.15.
    """
    if "torch.distributed.tensor" not in sys.modules:
        return
    from torch.distributed.tensor import _redistribute
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache

    # Torch does not annotate it, which only strict mypy reports.
    _clear_sharding_prop_cache()  # type: ignore[no-untyped-call, unused-ignore]
    _redistribute._gen_transform_infos.cache_clear()
    clear_planners = getattr(_redistribute, "clear_redistribute_planner_cache", None)
    if clear_planners is not None:
        clear_planners()

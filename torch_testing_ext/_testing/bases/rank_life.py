"""The life of a rank that is a process: prepare, announce, run, account, leave, wait for the peers."""

import itertools
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist

from torch_testing_ext._machine import random_state
from torch_testing_ext._process import system
from torch_testing_ext._testing.bases import group_creation, nodes_apart, shared_devices
from torch_testing_ext._testing.bases.rank_accounts import recorded_account
from torch_testing_ext._torch import compiler_state
from torch_testing_ext._torch.devices import first_accelerator_use
from torch_testing_ext._torch.groups import process_groups
from torch_testing_ext.launch import RankContext, rank_stops, rank_variables

# Its type stubs lack what comes from C++.
c10d: Any = dist
# Importing fewer modules than this in each rank costs less than a preload hint.
_WORTH_A_HINT = 10


def run_rank(
    context: RankContext,
    body: Callable[[], object],
    *,
    ends_process: bool = True,
    leaves_groups: bool = True,
    reports_imports: bool = False,
    meets_peers: bool = True,
) -> None:
    """Run `body` as all there is to do in this rank, and account for how it ends.

    A body may write the account itself; returning without one means that it has passed. `ends_process` is false where
    sys.exit() ends only a test of unittest, whose exit code may mean a skip. `leaves_groups` is false where the body
    decides about the process groups that are left. With `reports_imports`, rank 0 says which modules of torch it had
    to import, so that later ranks can inherit them. `meets_peers` is false where ranks do not communicate.
    """
    rank_variables.set_variables_of_rank(context)
    if context.place.node:
        nodes_apart.keep_stores_apart(context.place)
    prepare_rank(context, meets_peers)
    count = len(sys.modules)
    try:
        with recorded_account(context.account, ends_process=ends_process):
            rank_stops.at_test()
            body()
            if context.account.account is None:
                if leaves_groups:
                    leave_process_group(context.fast_exit)
                context.account.passed(_imported_since(count) if reports_imports and context.rank == 0 else ())
    finally:
        if compiler_state.COMPILE_POOL in sys.modules:
            compiler_state.end_compile_workers()
        if context.group_creation is not None and context.group_creation.created:
            group_creation.wait_for_peers()


def prepare_rank(context: RankContext, meets_peers: bool = True) -> None:
    """Reset the state that a rank must not inherit, and let its peers know from now on while it creates groups."""
    if context.seed is not None:
        # A new interpreter has not seen --seed.
        random_state.SEED = context.seed
    random_state.set_rng_seed()
    is_set = "OMP_NUM_THREADS" in os.environ
    threads = torch.get_num_threads() if is_set else max(1, system.cores() // context.world_size)
    # Even to the same number: torch replaces a pool that was forked at its next use; in threads of autograd, it aborts.
    torch.set_num_threads(threads)
    if "TORCH_DISTRIBUTED_DEBUG" in os.environ:
        # torch reads it only at import, which was before the fork.
        c10d.set_debug_level_from_env()
    first_accelerator_use.stop_noting()
    shared_devices.prepare_shared_devices(context.rank, context.world_size)
    if context.is_debugged:
        process_groups.wait_without_end()
    if meets_peers:
        group_creation.announce_creation(context)


def leave_process_group(fast: bool) -> None:
    """Destroy the process groups at a rank's end; with `fast`, leave gloo's groups to the end of the process."""
    if not dist.is_initialized() or (fast and process_groups.only_gloo()):
        return
    group_creation.wait_for_peers()
    with suppress(AssertionError, ValueError):
        dist.destroy_process_group()


def _imported_since(count: int) -> tuple[str, ...]:
    """Return the modules of torch imported since there were `count` modules, if they are worth a preload hint.

    Modules that code has made, such as inductor's kernels, have no spec, and nothing could import them.
    """
    # From the end: reading all names would copy the memory pages that hold them.
    added = max(0, len(sys.modules) - count)
    latest = itertools.islice(reversed(sys.modules), added)
    of_torch = [name for name in latest if name.startswith("torch.")]
    new = [name for name in of_torch if getattr(sys.modules[name], "__spec__", None)]
    return tuple(reversed(new)) if len(new) >= _WORTH_A_HINT else ()

"""The devices, ranks, backends and platforms that a distributed test needs."""

from collections.abc import Callable
from typing import Any, ClassVar

from torch_testing_ext._machine import accelerators
from torch_testing_ext._machine.backend_names import uses_nccl

from .needs import TEST_SKIPS, F, Need, TestSkip, devices, requires, too_few_devices
from .world_size_needs import world_size_in_environ

DDP_RANK_DEVICES = ["cuda", "xpu"]


class DistTestCases:
    """Tables of the backends that lack a collective and of those that have a feature."""

    skip_collective: ClassVar[dict[str, set[str]]] = {
        "allgather_coalesced": {"nccl", "mpi", "ucc", "xccl"},
        "reduce": set(),
        "sendrecv anysource": {"nccl", "ucc", "xccl"},
        "cpu barrier": {"nccl", "ucc", "xccl"},
    }
    backend_feature: ClassVar[dict[str, set[str]]] = {
        "gpu": {"nccl", "gloo", "ucc", "xccl"},
        "cuda": {"nccl", "gloo", "ucc"},
        "ddp": {"nccl", "gloo", "ucc", "xccl"},
        "subgroup": {"nccl", "gloo", "ucc", "xccl"},
        "plugin": set(),
        "hpu": {"hccl"},
        "xpu": {"xccl"},
    }


def requires_ddp_rank(device: str) -> bool:
    return device in DDP_RANK_DEVICES


def at_least_x_gpu(x: int) -> bool:
    return accelerators.most_ranks() >= max(x, 1)


def skip_if_lt_x_gpu(x: int, *, allow_cpu: bool = False) -> Callable[[F], F]:
    """Decorator: skip with fewer than `x` accelerators. With `allow_cpu`, run on the CPU if there are none."""
    return requires(devices(x, allow_cpu))


def skip_if_no_gpu(func: F) -> F:
    """Skip with fewer accelerators than the ranks in WORLD_SIZE."""

    def unmet() -> TestSkip | None:
        available = accelerators.most_ranks()
        if available == 0:
            return TEST_SKIPS["no_accelerator"]
        wanted = world_size_in_environ()
        return too_few_devices(wanted) if available < wanted else None

    return requires(Need(unmet, devices=1))(func)


def nccl_skip_if_lt_x_gpu(backend: str, x: int) -> Callable[[F], F]:
    """Skip with fewer than `x` accelerators, if the backend is NCCL, by whichever of its names."""
    if not uses_nccl(backend):
        return unchanged
    return requires(devices(x))


def require_n_gpus_for_nccl_backend(n: int, backend: str) -> Callable[[F], F]:
    """`nccl_skip_if_lt_x_gpu` with its arguments swapped."""
    return nccl_skip_if_lt_x_gpu(backend, n)


def requires_world_size(n: int) -> Callable[[F], F]:
    """Require `n` ranks, each with an accelerator of its own; a harness reads it with `get_required_world_size`."""
    lacking = devices(n)

    def unmet() -> TestSkip | None:
        if lacking.unmet() is None:
            return None
        message = f"requires {n} accelerators, found {accelerators.most_ranks()}"
        return TestSkip(too_few_devices(n).exit_code, message)

    return requires(Need(unmet, devices=n, world_size=n))


def get_required_world_size(obj: Any, default: int) -> int:
    """Return the number of ranks that `requires_world_size` set on the current test of `obj`, else `default`."""
    current = getattr(obj, "_current_test_name", None)
    name = current() if callable(current) else getattr(obj, "_testMethodName", "")
    test = getattr(obj, name, None)
    return int(getattr(test, "_required_world_size", default))


def unchanged(func: F) -> F:
    return func

"""Process groups that do not communicate."""

import inspect
from collections.abc import Callable
from typing import Any


def fake_process_group() -> Any:
    """The class of process groups that do not communicate: 2.11 to 2.15."""
    from torch._C._distributed_c10d import FakeProcessGroup

    return FakeProcessGroup


def register_fake_backend() -> None:
    """Register backend="fake", whose groups do not communicate. Registering twice is harmless.

    `FakeProcessGroup._create_internal`: 2.11 to 2.15.
    """
    import torch.distributed as dist

    def make(common: Any, options: Any) -> Any:
        return fake_process_group()._create_internal(common.group_rank, common.group_size, options)

    dist.Backend.register_backend("fake", make, extended_api=True, devices=["cpu", "cuda", "hpu", "xpu"])


def options_of_alike_ranks() -> Any:
    """Options of a fake group that computes as if all ranks had the values of this one: 2.15; None where torch cannot.

    It does not know whether they have.
    """
    if not hasattr(getattr(fake_process_group(), "Options", None), "simulate_uniform_ranks"):
        return None
    options = fake_process_group().Options()
    options.simulate_uniform_ranks = True
    return options


def make_groups_fake(on_made: Callable[[], None]) -> None:
    """From now on, let each group that this process makes have the fake backend, whatever was asked for.

    Its operations are not put together, as those of gloo are not. `_new_process_group_helper`: all versions.
    """
    import torch.distributed as dist

    c10d: Any = dist.distributed_c10d
    create = c10d._new_process_group_helper
    signature = inspect.signature(create)

    def create_fake(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        bound.arguments.update(backend="fake", backend_options=options_of_alike_ranks())
        made = create(*bound.args, **bound.kwargs)
        on_made()
        return made

    fake_process_group().supports_coalescing = False
    c10d._new_process_group_helper = create_fake

"""Process groups that do not communicate."""

from collections.abc import Callable
from typing import Any

from . import group_creators


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

    Its operations are not put together, as those of gloo are not.
    """

    def create_fake(arguments: dict[str, Any], create: Callable[[], Any]) -> Any:
        arguments.update(backend="fake", backend_options=options_of_alike_ranks())
        made = create()
        on_made()
        return made

    fake_process_group().supports_coalescing = False
    group_creators.take_part(create_fake)


def issue_without_peers() -> None:
    """Issue an all_reduce that goes through c10d as any other, in a group of this rank alone that nobody knows.

    `ProcessGroup`, `_register_backend`: 2.11 to 2.15.
    """
    import torch
    import torch.distributed as dist

    c10d: Any = dist
    group = c10d.ProcessGroup(c10d.HashStore(), 0, 1)
    backend = fake_process_group()._create_internal(0, 1)
    group._register_backend(torch.device("cpu"), c10d.ProcessGroup.BackendType.CUSTOM, backend)
    group.allreduce([torch.zeros(1)]).wait()

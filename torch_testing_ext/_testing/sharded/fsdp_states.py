"""Helpers to read, move and compare the parameters and state dicts of FSDP1 and FSDP2 models."""

from collections.abc import Callable
from contextlib import nullcontext
from copy import deepcopy
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from . import fsdp_devices

State = dict[str, torch.Tensor]


def get_full_params(model: nn.Module, recurse: bool = True) -> list[nn.Parameter]:
    """Copy the unsharded parameters of `model`; with `recurse=False`, without those of its submodules."""
    with FSDP.summon_full_params(model, recurse=recurse):
        return deepcopy(list(model.parameters()))


@torch.no_grad()
def _zero_model(model: nn.Module, zero_buffers: bool = False, summon_full: bool = True) -> None:
    """Set all parameters (and buffers) of `model` to zero in place."""
    with FSDP.summon_full_params(model) if summon_full else nullcontext():
        for parameter in model.parameters():
            parameter.zero_()
        for buffer in model.buffers() if zero_buffers else ():
            buffer.zero_()


def _get_state_dict(model: nn.Module, cpu_offload: bool = False, half: bool = False) -> State:
    if not cpu_offload:
        model = model.to(fsdp_devices.device_type())
    if half:
        model.half()
    return model.state_dict()


def _broadcast_state_dict(rank: int, state_dict: State) -> State:
    """Broadcast rank 0's state dict to every rank's device, through the CPU, where parts of it may be already."""
    box: list[State | None] = [None]
    if rank == 0:
        for name, value in state_dict.items():
            state_dict[name] = value.cpu()
        box = [state_dict]
    dist.broadcast_object_list(box)
    received = box[0] or {}
    return {name: value.to(fsdp_devices.device_type()) for name, value in received.items()}


def _assert_module_states(
    model: nn.Module, process_group: dist.ProcessGroup, assert_fn: Callable[[torch.Tensor, torch.Tensor], Any]
) -> None:
    """Call `assert_fn` on rank 0's and each other rank's value of every parameter and buffer of `model`."""
    mine = [(name, p.detach().cpu()) for name, p in model.named_parameters()]
    mine += [(name, b.detach().cpu()) for name, b in model.named_buffers()]
    everyones: list[Any] = [None] * dist.get_world_size(process_group)
    dist.all_gather_object(everyones, mine, group=process_group)
    first, *others = everyones
    for other in others:
        for (_, expected), (_, actual) in zip(first, other, strict=True):
            assert_fn(expected, actual)


def check_sharded_parity(
    cls: Any, replicated_module: nn.Module, sharded_module: nn.Module, prefixes_to_ignore: tuple[str, ...] = ()
) -> None:
    """Assert that this rank's shards of parameters and gradients equal shards of the replicated module's.

    `cls` is the test case. `prefixes_to_ignore` are removed from the sharded module's parameter names first.
    """
    pairs = zip(replicated_module.named_parameters(), sharded_module.named_parameters(), strict=True)
    for (name, replicated), (sharded_name, sharded) in pairs:
        for prefix in prefixes_to_ignore:
            sharded_name = sharded_name.replace(prefix, "")
        cls.assertEqual(name, sharded_name)
        _check_shard(cls, f"parameter {name}", replicated, sharded, like=sharded)
        if replicated.grad is None:
            cls.assertIsNone(sharded.grad, f"{name} has a gradient only where it is sharded")
            continue
        cls.assertIsNotNone(sharded.grad, f"{name} has a gradient only where it is replicated")
        _check_shard(cls, f"gradient of {name}", replicated.grad, sharded.grad, like=sharded)


def _check_shard(cls: Any, what: str, whole: torch.Tensor, shard: Any, *, like: Any) -> None:
    cls.assertIsInstance(shard, DTensor, what)
    if tuple(like.placements) == (Shard(0), Shard(0)):
        raise AssertionError(
            f"{what} is (Shard(0), Shard(0)), which FSDP and distribute_tensor shard in different orders: "
            "compare its full_tensor() instead"
        )
    expected = distribute_tensor(whole, like.device_mesh, like.placements)
    cls.assertEqual(shard.to_local(), expected.to_local(), msg=what)


def subtest_name(test_name_mapping: dict[str, str], *args: Any) -> str:
    """Join the mapped names of `args` by "_"; "none" for None."""
    return "_".join("none" if arg is None else test_name_mapping[str(arg)] for arg in args)


def _move_to_device(model: nn.Module, move_to_device: bool) -> nn.Module:
    return model.to(fsdp_devices.device_type()) if move_to_device else model


def _maybe_wrap_fsdp(model: nn.Module, wrap_fsdp: bool, *args: Any, **kwargs: Any) -> nn.Module:
    return FSDP(model, *args, **kwargs) if wrap_fsdp else model

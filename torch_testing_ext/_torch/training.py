"""Private names of autograd, optimizers and DTensor that the data-parallel compiler needs."""

from collections.abc import Callable
from typing import Any

import torch


def local_tensor(dtensor: Any) -> torch.Tensor:
    """The local tensor of a DTensor, without the autograd node and the overhead of `to_local` (torch 2.0 to 2.15)."""
    local: torch.Tensor = dtensor._local_tensor
    return local


def set_local_tensor(dtensor: Any, local: torch.Tensor) -> None:
    """Replace the local tensor of `dtensor` with one of the same shape, dtype and device (torch 2.0 to 2.15)."""
    dtensor._local_tensor = local


def dtensor_like(dtensor: Any, local: torch.Tensor, cls: type | None = None, requires_grad: bool = False) -> Any:
    """A DTensor with the shape and placements of another one, without the cost of `from_local` (torch 2.5 to 2.15)."""
    from torch.distributed.tensor import DTensor

    if local.dtype != dtensor.dtype:
        mesh, placements = dtensor.device_mesh, dtensor.placements
        shape, stride = dtensor.shape, dtensor.stride()
        dtensor = DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=stride)
    new: Any = DTensor.__new__
    return new(cls or DTensor, local, dtensor._spec, requires_grad=requires_grad)


def written_by(operation: Any, args: Any, kwargs: Any) -> list[Any]:
    """The arguments to which an operation writes (torch 1.13 to 2.15)."""
    arguments = operation._schema.arguments if operation._schema.is_mutable else ()
    return [
        args[place] if place < len(args) else kwargs.get(argument.name)
        for place, argument in enumerate(arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]


def depends_on_places(operation: Any) -> bool:
    """Whether an operation draws random numbers, or fills a tensor that it is given as `out=` (torch 2.0 to 2.15)."""
    return torch.Tag.nondeterministic_seeded in operation.tags or operation._overloadname.endswith("out")


def is_read_of_number(operation: Any) -> bool:
    """Whether an operation is that of `item()`, `float()` and `bool()` (torch 1.13 to 2.15)."""
    return operation is torch.ops.aten._local_scalar_dense.default


def key_of(storage: Any) -> int:
    """A unique key of a storage while it lives (torch 2.1 to 2.15)."""
    key: int = storage._cdata
    return key


def storage_key(tensor: torch.Tensor) -> int:
    """A unique key of a tensor's storage while it lives."""
    return key_of(tensor.untyped_storage())


def holders_of_memory(tensor: torch.Tensor) -> int:
    """The number of tensors, arrays and graphs that hold the memory of a tensor (torch 2.11 to 2.15)."""
    storage = tensor.untyped_storage()
    # The object of this storage is one of them.
    return int(torch._C._storage_Use_Count(storage._cdata)) - 1


class MemoryReference:
    """A weak reference to the memory of a plain tensor, which other tensors may keep alive (torch 2.0 to 2.15)."""

    def __init__(self, tensor: torch.Tensor) -> None:
        from torch.multiprocessing.reductions import StorageWeakRef

        self._storage = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
        self._offset, self._kind = tensor.storage_offset(), (tensor.shape, tensor.stride(), tensor.dtype)

    @staticmethod
    def of_kept(tensor: torch.Tensor | None) -> "MemoryReference | None":
        """A reference to the memory of a tensor, if something besides the tensor keeps it."""
        if tensor is None or tensor.layout is not torch.strided or holders_of_memory(tensor) == 1:
            return None
        return MemoryReference(tensor)

    def tensor(self, shape: torch.Size, stride: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor | None:
        """The tensor again, if something keeps its memory and it is of this kind."""
        if self._kind != (shape, stride, dtype):
            return None
        storage = torch.UntypedStorage._new_with_weak_ptr(self._storage.cdata)
        if storage is None:
            return None
        return torch.empty(0, dtype=dtype, device=storage.device).set_(storage, self._offset, shape, stride)


def below_torch_function() -> Any:
    """A context in which functions of subclasses are those of tensors (torch 1.13 to 2.15)."""
    return torch._C.DisableTorchFunctionSubclass()


def is_in_backward() -> bool:
    """Whether autograd runs a backward on this thread (torch 1.13 to 2.15)."""
    return bool(torch._C._current_graph_task_id() != -1)


# torch.compile traces what autograd and optimizers call; this keeps a function out (torch 2.1 to 2.15).
outside_dynamo: Callable[[Any], Any] = torch._compile._disable_dynamo


def at_end_of_backward(function: Callable[[], None]) -> None:
    """Call `function` when the backward that runs on this thread has ended (torch 1.0 to 2.15)."""
    engine: Any = torch.autograd.Variable._execution_engine
    engine.queue_callback(function)


def gather_into(into: torch.Tensor, mine: torch.Tensor, group: Any) -> Any:
    """Start to gather tensors of one size into a flat one, under the name that does not warn (torch 2.11 to 2.15)."""
    import torch.distributed as dist

    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return gather(into, mine, group=group, async_op=True)


def optimizer_has_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Whether hooks of others run before or after each step of an optimizer (torch 2.0 to 2.15)."""
    from torch.optim import optimizer as module

    hooks = (
        optimizer._optimizer_step_pre_hooks,
        optimizer._optimizer_step_post_hooks,
        module._global_optimizer_pre_hooks,
        module._global_optimizer_post_hooks,
    )
    return any(not _is_ours(hook) for registry in hooks for hook in registry.values())


def is_wrapped_by_scheduler(step: Any) -> bool:
    """Whether a learning rate scheduler, and nobody else, has wrapped an optimizer's step (torch 2.5 to 2.15)."""
    return hasattr(step, "_wrapped_by_lr_sched")


def gradient_hooks(tensor: torch.Tensor) -> int:
    """The number of hooks of others on a tensor's gradient (torch 2.1 to 2.15)."""
    registries: Any = tensor._backward_hooks, tensor._post_accumulate_grad_hooks
    hooks = [hook for registry in registries if registry for hook in registry.values()]
    return sum(not _is_ours(hook) for hook in hooks)


def _is_ours(hook: Any) -> bool:
    return str(getattr(hook, "__module__", "")).startswith("torch_testing_ext.")


def run_hook_last(tensor: torch.Tensor, handle: Any) -> bool:
    """Let a post-accumulate hook run after those registered since. Returns whether it did already (torch 2.1 to 2.15).

    torch reads the values of the dict itself, whose order `move_to_end` does not change.
    """
    hooks: Any = tensor._post_accumulate_grad_hooks
    if next(reversed(hooks)) == handle.id:
        return True
    hooks[handle.id] = hooks.pop(handle.id)
    return False


def version_of(tensor: torch.Tensor) -> int:
    """The number of writes to a tensor's memory, its views included (torch 1.0 to 2.15)."""
    return tensor._version


def copy_all(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    """Copy each source to its target, in one call (torch 2.1 to 2.15)."""
    if targets:
        torch._foreach_copy_(targets, sources)

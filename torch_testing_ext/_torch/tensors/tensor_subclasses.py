"""Functions of torch for a tensor subclass that wraps other tensors."""

from collections.abc import Callable, Sequence
from typing import Any

import torch


def make_wrapper_subclass(
    cls: type, like: torch.Tensor, size: Sequence[int], stride: Sequence[int], requires_grad: bool
) -> Any:
    """A tensor of the class without storage of its own. `torch.Tensor._make_wrapper_subclass`: 2.11 to 2.15."""
    return torch.Tensor._make_wrapper_subclass(
        cls,
        size,
        strides=stride,
        storage_offset=like.storage_offset(),
        device=like.device,
        layout=like.layout,
        requires_grad=requires_grad,
        dtype=like.dtype,
    )


def exportable_constructor(init: Callable[..., None]) -> Callable[..., None]:
    """Let torch.export trace a subclass's __init__, and Dynamo leave it alone.

    `mark_subclass_constructor_exportable_experimental`, `torch._disable_dynamo`: 2.11 to 2.15.
    """
    from torch._export import wrappers

    kit: Any = torch  # untyped in torch
    mark: Any = wrappers.mark_subclass_constructor_exportable_experimental
    marked: Callable[..., None] = kit._disable_dynamo(mark(init))
    return marked


def correct_aliasing(func: Any, args: Any, kwargs: Any, out: Any) -> Any:
    """Let outputs that alias an input share its storage. `return_and_correct_aliasing`: 2.11 to 2.15."""
    from torch._higher_order_ops.cond import cond_op
    from torch.utils import _python_dispatch

    correct: Any = _python_dispatch.return_and_correct_aliasing  # untyped in torch
    return out if func is cond_op else correct(func, args, kwargs, out)


def dispatch_mode_class() -> type:
    """Return the base of modes that see every operation. `TorchDispatchMode`: 2.11 to 2.15."""
    from torch.utils._python_dispatch import TorchDispatchMode

    return TorchDispatchMode


def is_tensor_constructor(func: Any) -> bool:
    """Whether the operation makes a tensor from none. `fake_tensor._is_tensor_constructor`: 2.11 to 2.15."""
    from torch._subclasses import fake_tensor

    module: Any = fake_tensor  # untyped in torch
    return bool(module._is_tensor_constructor(func))


def rpc_transports(names: Sequence[str] | None) -> dict[str, Any]:
    """The arguments of TensorPipeRpcBackendOptions that choose transports. `_transports`: 2.11 to 2.15."""
    return {"_transports": names}

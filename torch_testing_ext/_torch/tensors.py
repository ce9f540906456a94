"""Tensors: their comparison, subclasses, and reads that no dispatch mode sees."""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """The tensors of an argument: itself, or those in lists, tuples and dicts. pytree, which knows more, is slower."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for inner in value:
            yield from tensors_in(inner)
    elif isinstance(value, dict):
        for inner in value.values():
            yield from tensors_in(inner)


# --------------------------------------------------------------------------------------------------------------------
# Comparison of tensors.

_LARGE = 4096  # numbers
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@functools.cache
def _pairs() -> tuple[type, type]:
    """The classes of two tensors and of two numbers."""
    from torch.testing._comparison import NumberPair, TensorLikePair

    class AnyTensors(TensorLikePair):
        """Two tensors of any subclasses."""

        def _process_inputs(self, actual: Any, expected: Any, *, id: Any, allow_subclasses: bool) -> Any:
            for tensor in (actual, expected):
                self._check_supported(tensor, id=id)
            return actual, expected

        def _compare_regular_values_close(
            self, actual: Any, expected: Any, *, rtol: float, atol: float, **options: Any
        ) -> None:
            if rtol >= 0 and atol >= 0 and _are_large_and_equal(actual, expected):  # others are errors
                return
            super()._compare_regular_values_close(actual, expected, rtol=rtol, atol=atol, **options)

    class AnyNumbers(NumberPair):
        """Two numbers of Python, with the default tolerances of 32 bits."""

        _TYPE_TO_DTYPE = {int: torch.int64, float: torch.float32, complex: torch.complex64}  # noqa: RUF012

    return AnyTensors, AnyNumbers


def _are_large_and_equal(actual: Any, expected: Any) -> bool:
    """Are all numbers of two plain tensors equal? This needs no memory, whereas tolerances make several copies.

    A NaN equals nothing here. Not asked of small tensors, nor within a mode that sees every operation.
    """
    if not type(actual) is type(expected) is torch.Tensor or actual.numel() < _LARGE:
        return False
    if actual.dtype != expected.dtype or actual.dtype not in _FLOATS:
        return False
    if not actual.device.type == expected.device.type == "cpu" or torch._C._len_torch_dispatch_stack():
        return False
    return torch.equal(actual, expected)


def compare(actual: Any, expected: Any, *, rtol_floor: float, atol_floor: float, **options: Any) -> None:
    """Call the equivalent of `torch.testing.assert_close` on two tensors of any subclasses, or two numbers of Python.

    It raises the same errors. The floors can raise the tolerances but not lower them.

    The public function imports all of torch.distributed.tensor at its first call, which takes half a second in every
    rank, and refuses subclasses that do not inherit from one another. `torch.testing._comparison`: 2.11 to 2.15.
    """
    from torch.testing._comparison import ErrorMeta

    tensors, numbers = _pairs()
    try:
        pair: Any = (tensors if isinstance(actual, torch.Tensor) else numbers)(actual, expected, **options)
        pair.rtol, pair.atol = max(pair.rtol, rtol_floor), max(pair.atol, atol_floor)
        pair.compare()
    except ErrorMeta as meta:
        error = meta.to_error()
    else:
        return
    raise error


def wrap_differences(around: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Wrap what looks for differences in `torch.testing.assert_close`, by whatever name a test has imported that.

    `torch.testing._comparison.not_close_error_metas`: 2.11 to 2.15.
    """
    from torch.testing import _comparison

    _comparison.not_close_error_metas = around(_comparison.not_close_error_metas)


def script_container_types() -> tuple[type, type]:
    """Return TorchScript's list and dict. `torch._C.ScriptList`, `ScriptDict`: 2.11 to 2.15."""
    return torch._C.ScriptList, torch._C.ScriptDict


# --------------------------------------------------------------------------------------------------------------------
# Functions of torch for a tensor subclass that wraps other tensors.


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


def is_tensor_constructor(func: Any) -> bool:
    """Does the operation make a tensor from none? `fake_tensor._is_tensor_constructor`: 2.11 to 2.15."""
    from torch._subclasses import fake_tensor

    module: Any = fake_tensor  # untyped in torch
    return bool(module._is_tensor_constructor(func))


def rpc_transports(names: Sequence[str] | None) -> dict[str, Any]:
    """The arguments of TensorPipeRpcBackendOptions that choose transports. `_transports`: 2.11 to 2.15."""
    return {"_transports": names}


# --------------------------------------------------------------------------------------------------------------------
# Reads of tensors that no dispatch mode sees: by Python's own protocols, through numpy, and through `.data`.

# All of 2.11 to 2.15, here or in a base class.
_METHODS = (
    *("__array__", "__bool__", "__float__", "__format__", "__int__", "__reduce_ex__", "__repr__"),
    *("item", "numpy", "tolist"),
)


class ReadListener(Protocol):
    """Hears of tensors that are read in any thread."""

    def on_read(self, method: str, tensor: torch.Tensor) -> None:
        """A method of the tensor is about to read it."""

    def on_alias(self, tensor: torch.Tensor, alias: torch.Tensor) -> None:
        """`.data` of a tensor was taken, which counts writes by itself."""


_listeners: list[ReadListener] = []
_replaced: dict[str, Any] = {}  # the attributes that `torch.Tensor` had itself; None for one of its base


def listen_to_reads(listener: ReadListener) -> None:
    """Tell a listener of all reads from now on. Only while somebody listens are the methods of tensors others."""
    _listeners.append(listener)
    if len(_listeners) == 1:
        for name in (*_METHODS, "data"):
            _replaced[name] = vars(torch.Tensor).get(name)
            setattr(torch.Tensor, name, _watched(name, getattr(torch.Tensor, name)))


def stop_listening_to_reads(listener: ReadListener) -> None:
    """Tell it no more."""
    _listeners.remove(listener)
    if not _listeners:
        for name, method in _replaced.items():
            delattr(torch.Tensor, name) if method is None else setattr(torch.Tensor, name, method)
        _replaced.clear()


@functools.cache  # each asynchronous collective listens
def _watched(name: str, method: Any) -> Any:
    if name == "data":
        return _data(method)

    @functools.wraps(method)
    def call(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        for listener in list(_listeners):
            listener.on_read(name, self)
        return method(self, *args, **kwargs)

    return call


def _data(base: Any) -> property:
    def get(self: torch.Tensor) -> torch.Tensor:
        alias: torch.Tensor = base.__get__(self)
        for listener in list(_listeners):
            listener.on_alias(self, alias)
        return alias

    return property(get, base.__set__)

"""Subclasses that wrap tensors have the metadata of what they wrap."""

import pytest
import torch

from torch_testing_ext._torch.tensors import tensor_subclasses


class Wrapper(torch.Tensor):
    __torch_function__ = torch._C._disabled_torch_function_impl
    __torch_dispatch__ = None


def test_wrapper():
    like = torch.ones(8, dtype=torch.float64)[3:].view(5)
    made = tensor_subclasses.make_wrapper_subclass(Wrapper, like, (2, 3), (1, 2), requires_grad=True)
    assert type(made) is Wrapper and made.dtype is torch.float64 and made.requires_grad
    assert (made.shape, made.stride(), made.storage_offset()) == ((2, 3), (1, 2), 3)
    assert not tensor_subclasses.make_wrapper_subclass(Wrapper, like, (1,), (1,), False).requires_grad


def test_constructors():
    class Own(torch.Tensor):
        __torch_dispatch__ = None

        @staticmethod
        def __new__(cls, value):
            return tensor_subclasses.make_wrapper_subclass(cls, value, (2,), (1,), False)

        @tensor_subclasses.exportable_constructor
        def __init__(self, value):
            self.value = value

    value = torch.ones(2)
    assert Own(value).value is value


def test_aliasing():
    """A result that torch says is a view shares the memory of its input."""
    a = torch.ones(2, 3)

    class Own(torch.Tensor):
        @classmethod
        def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
            out = tensor_subclasses.make_wrapper_subclass(cls, args[0], (3, 2), (1, 3), False)
            return tensor_subclasses.correct_aliasing(func, args, kwargs or {}, out)

    own = tensor_subclasses.make_wrapper_subclass(Own, a, (2, 3), (3, 1), False)
    turned = torch.ops.aten.t.default(own)
    assert turned.untyped_storage()._cdata == own.untyped_storage()._cdata


def test_modes():
    class Mode(tensor_subclasses.dispatch_mode_class()):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    seen = []
    with Mode():
        torch.ones(1)
    assert seen == ["aten.ones.default"]


@pytest.mark.parametrize(
    ("func", "expected"),
    [(torch.ops.aten.ones.default, True), (torch.ops.aten.randn.default, True), (torch.ops.aten.add.Tensor, False)],
)
def test_questions(func, expected):
    assert tensor_subclasses.is_tensor_constructor(func) is expected


def test_transports():
    from torch.distributed import rpc

    options = rpc.TensorPipeRpcBackendOptions(**tensor_subclasses.rpc_transports(["uv"]))
    assert options.rpc_timeout > 0
    with pytest.raises(TypeError):
        rpc.TensorPipeRpcBackendOptions(**tensor_subclasses.rpc_transports(3))

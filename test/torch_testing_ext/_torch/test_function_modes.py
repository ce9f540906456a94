"""Modes of torch that see its functions are counted, removed and turned off."""

import torch
from kit.own_process import in_own_process
from torch.overrides import TorchFunctionMode

from torch_testing_ext._torch import function_modes


class Counting(TorchFunctionMode):
    seen = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.seen += 1
        return func(*args, **(kwargs or {}))


@in_own_process
def test_modes():
    before = function_modes.torch_function_modes()
    outer, inner = Counting(), Counting()
    outer.__enter__()
    inner.__enter__()
    assert function_modes.torch_function_modes() == before + 2
    function_modes.pop_torch_function_mode()
    torch.ones(1)
    assert (outer.seen, inner.seen) == (1, 0)
    function_modes.pop_torch_function_mode()
    assert function_modes.torch_function_modes() == before


@in_own_process
def test_state():
    class Tensor(torch.Tensor):
        seen = 0

        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            cls.seen += 1
            return super().__torch_function__(func, types, args, kwargs or {})

    tensor = torch.ones(1).as_subclass(Tensor)
    enabled = function_modes.torch_function_state()
    with torch._C.DisableTorchFunctionSubclass():
        torch.add(tensor, 1)
        assert Tensor.seen == 0
        function_modes.set_torch_function_state(enabled)
        torch.add(tensor, 1)
        assert Tensor.seen > 0
    assert function_modes.torch_function_state() == enabled

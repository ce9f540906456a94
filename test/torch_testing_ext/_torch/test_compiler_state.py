"""The state of torch's compiler is forgotten where the compiler is imported, and left alone elsewhere."""

import sys
from types import SimpleNamespace
from unittest import mock

import pytest
from kit.own_process import error_of, in_own_process

from torch_testing_ext._torch import compiler_state


def test_without_the_compiler():
    """Nothing imports it."""
    with mock.patch.dict(sys.modules):
        for name in (compiler_state.DYNAMO, compiler_state.COMPILE_POOL):
            sys.modules.pop(name, None)
        compiler_state.reset_dynamo()
        compiler_state.end_compile_workers()
        assert not {compiler_state.DYNAMO, compiler_state.COMPILE_POOL} & {*sys.modules}


def test_with_the_compiler():
    called = []
    modules = {
        compiler_state.DYNAMO: SimpleNamespace(reset=lambda: called.append("reset")),
        compiler_state.COMPILE_POOL: SimpleNamespace(shutdown_compile_workers=lambda: called.append("ended")),
    }
    with mock.patch.dict(sys.modules, modules):
        compiler_state.reset_dynamo()
        compiler_state.end_compile_workers()
    assert called == ["reset", "ended"]


@pytest.mark.slow  # imports the compiler
@in_own_process
def test_compiled_functions():
    import torch._dynamo
    from torch._dynamo.testing import CompileCounter

    def count(function):
        counter = CompileCounter()
        compiled = torch.compile(function, backend=counter)
        return counter, compiled

    counter, compiled = count(lambda tensor: tensor + 1)
    compiled(torch.ones(1))
    compiled(torch.ones(1))
    assert counter.frame_count == 1 and torch._dynamo.utils.counters
    compiler_state.forget_compiled()
    assert not torch._dynamo.utils.counters
    compiled(torch.ones(1))
    assert counter.frame_count == 2

    def broken(graph, inputs):
        raise ValueError("broken")

    with torch._dynamo.config.patch(suppress_errors=True):
        assert torch.compile(lambda tensor: tensor + 2, backend=broken)(torch.ones(1)).item() == 3
        with compiler_state.strict_dynamo():
            error = error_of(lambda: torch.compile(lambda tensor: tensor + 3, backend=broken)(torch.ones(1)))
    assert "broken" in str(error)
    with compiler_state.without_compiled_autograd():
        parameter = torch.ones(1, requires_grad=True)
        parameter.sum().backward()
    assert parameter.grad is not None

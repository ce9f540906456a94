"""Tensors and numbers compare as by `torch.testing.assert_close`, with floors for tolerances."""

from unittest import mock

import pytest
import torch
from kit.own_process import error_of, in_own_process

from torch_testing_ext._torch.tensors import tensor_comparison


def compare(actual, expected, rtol_floor=0.0, atol_floor=0.0, **options):
    tensor_comparison.compare(actual, expected, rtol_floor=rtol_floor, atol_floor=atol_floor, **options)


@pytest.mark.parametrize(
    ("actual", "expected"),
    [
        (torch.ones(2), torch.tensor([1.0, 2.0])),
        (torch.ones(2), torch.ones(3)),
        (torch.ones(2), torch.ones(2, dtype=torch.float64)),
        (torch.tensor([float("nan")]), torch.tensor([float("nan")])),
        (torch.zeros(5000), torch.ones(5000)),
        (1.0, 1.1),
    ],
)
def test_errors_are_those_of_torch(actual, expected):
    ours = error_of(lambda: compare(actual, expected))
    theirs = error_of(lambda: torch.testing.assert_close(actual, expected))
    # The tolerance of a number is that of 32 bits here.
    assert type(ours) is type(theirs) is AssertionError
    if isinstance(actual, torch.Tensor):
        assert str(ours) == str(theirs)


def test_floors():
    """They raise a tolerance, and lower none."""
    compare(torch.tensor([1.0]), torch.tensor([1.05]), rtol_floor=0.1)
    compare(torch.tensor([0.0]), torch.tensor([0.05]), atol_floor=0.1)
    compare(torch.tensor([1.0]), torch.tensor([1.5]), rtol=1.0, atol=0.0, rtol_floor=0.1)
    assert error_of(lambda: compare(torch.tensor([1.0]), torch.tensor([1.5]), rtol_floor=0.1))


def test_numbers():
    compare(1.0, 1.0 + 1e-6)
    assert error_of(lambda: compare(1.0, 1.0 + 1e-4))


def test_unrelated_subclasses():
    class A(torch.Tensor):
        __torch_function__ = torch._C._disabled_torch_function_impl

    class B(torch.Tensor):
        __torch_function__ = torch._C._disabled_torch_function_impl

    compare(torch.ones(2).as_subclass(A), torch.ones(2).as_subclass(B))


def test_large_tensors_that_are_equal():
    """They are compared without tolerances, which make copies; others, and small ones, as ever."""
    with mock.patch.object(torch, "isclose", side_effect=AssertionError("it made copies")):
        compare(torch.ones(5000), torch.ones(5000))
        assert error_of(lambda: compare(torch.ones(5), torch.ones(5)))
    large = torch.ones(5000)
    large[7] = float("nan")
    compare(large, large.clone(), equal_nan=True)
    assert error_of(lambda: compare(large, large.clone()))
    assert error_of(lambda: compare(torch.ones(5000), torch.ones(5000), -1.0, rtol=-1.0, atol=0.0))


@in_own_process
def test_differences_are_wrapped():
    called = []

    def around(find):
        def call(*args, **kwargs):
            called.append(True)
            return find(*args, **kwargs)

        return call

    assert_close = torch.testing.assert_close
    tensor_comparison.wrap_differences(around)
    assert error_of(lambda: assert_close(torch.ones(1), torch.zeros(1)))
    assert called == [True]


def test_containers_of_torchscript():
    lists, dicts = tensor_comparison.script_container_types()
    assert isinstance(torch.jit.script([1, 2]), lists) and isinstance(torch.jit.script({"a": 1}), dicts)
    assert not isinstance([], lists) and not isinstance({}, dicts)

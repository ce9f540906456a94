"""Values that are not finite are counted, and others overwritten without a trace."""

import math

import pytest
import torch

from torch_testing_ext._torch.tensors import tensor_values

NAN, INF = math.nan, math.inf


@pytest.mark.parametrize(
    ("values", "neutral", "expected"),
    [
        ([1.0, -2.0], None, None),
        ([NAN, 1.0, NAN], None, (2, 0)),
        ([INF, -INF, NAN], None, (1, 2)),
        # What a rank gives that has nothing to add.
        ([-INF, 1.0], -INF, None),
        ([-INF, INF], -INF, (0, 1)),
        ([], None, None),
    ],
)
def test_counts(values, neutral, expected):
    for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16):
        assert tensor_values.non_finite(torch.tensor(values, dtype=dtype), neutral) == expected


def test_kinds_of_tensors():
    assert tensor_values.non_finite(torch.tensor([complex(NAN, 1)])) == (1, 0)
    assert tensor_values.non_finite(torch.tensor([NAN]).to(torch.float8_e5m2)) == (1, 0)
    for tensor in (torch.ones(1, dtype=torch.int64), torch.full((2,), NAN).to_sparse(), torch.ones(1, device="meta")):
        assert tensor_values.non_finite(tensor) is None


def test_nothing_is_recorded():
    tensor = torch.ones(1, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda _: pytest.fail("it was recorded"), lambda _: None):
        assert tensor_values.non_finite(tensor * 1) is None


def test_neutral_values():
    assert [tensor_values.neutral_of(op) for op in ("max", "min", "sum", None)] == [-INF, INF, None, None]


def test_overwriting():
    leaf = torch.ones(2, requires_grad=True)
    product = leaf * leaf
    version = leaf._version
    tensor_values.overwrite(leaf, 5.0)
    assert leaf.tolist() == [5, 5] and leaf._version == version and leaf.grad_fn is None
    product.sum().backward()

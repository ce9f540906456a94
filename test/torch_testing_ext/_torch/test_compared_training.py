"""Changes of torch while a training is compared, in a process of their own: they last until it ends."""

import unittest

import torch
import torch.nn.functional as F
from kit.own_process import in_own_process

from torch_testing_ext._torch.compared_training import (
    before_norms,
    compute_in_float64,
    drop_by_values,
    drop_nothing,
    is_training,
)


def precision():
    compute_in_float64()
    values = torch.ones(2)
    for changed in (
        values.float(),
        values.half(),
        values.bfloat16(),
        values.to(torch.float16),
        values.to("cpu", torch.half),
    ):
        assert changed.dtype == torch.float64
    assert values.to(dtype=torch.float32).dtype == torch.float64
    assert values.to("cpu").dtype == torch.float32
    assert values.to(torch.int64).dtype == torch.int64
    assert values.to(torch.ones(1, dtype=torch.int32)).dtype == torch.int32


def dropout():
    drawn = []
    drop_by_values(lambda input, mask: drawn.append(mask))
    values = torch.arange(1.0, 101.0).double()
    first, again, half = F.dropout(values, 0.3), F.dropout(values, 0.3), F.dropout(values[:50], 0.3)
    assert torch.equal(first, again)
    assert torch.equal(first[:50], half)
    assert 40 < (first != 0).sum() < 95
    assert len(drawn) == 3
    assert not torch.equal(drawn[0], drawn[1])
    assert torch.equal(F.dropout(values, 0.3, training=False), values)


def no_dropout():
    drop_nothing()
    values = torch.arange(1.0, 101.0)
    assert torch.equal(F.dropout(values, 0.9), values)
    assert torch.equal(torch.nn.Dropout(0.9)(values), values)


def norms():
    looks = []
    before_norms(lambda: looks.append(parameter.grad.tolist()))
    parameter = torch.nn.Parameter(torch.ones(2))
    parameter.grad = torch.full((2,), 3.0)
    torch.nn.utils.clip_grad_norm_([parameter], 1.0)
    assert looks == [[3.0, 3.0]]
    assert parameter.grad.norm() < 1.01


class ComparedTrainingTest(unittest.TestCase):
    def test_changes(self):
        for change in (precision, dropout, no_dropout, norms):
            with self.subTest(change.__name__):
                in_own_process(change)()

    def test_is_training(self):
        seen = []
        value = torch.ones(1, requires_grad=True)
        (value * 2).register_hook(lambda _: seen.append(is_training()))
        doubled = value * 2
        doubled.register_hook(lambda _: seen.append(is_training()))
        doubled.sum().backward()
        self.assertEqual(seen, [False])
        self.assertTrue(is_training())
        with torch.no_grad():
            self.assertFalse(is_training())

        def _shape_inference():
            return is_training()

        self.assertFalse(_shape_inference())


if __name__ == "__main__":
    unittest.main()

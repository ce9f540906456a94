"""Writes to a 0-d tensor of float64 in a compiled function, and item() after them."""

import unittest
from collections.abc import Callable
from unittest import mock

import torch
from torch._dynamo.backends.common import aot_autograd


WRITES = {
    "mul_": lambda t: t.mul_(3),
    "add_": lambda t: t.add_(1),
    "fill_": lambda t: t.fill_(5),
    "zero_": lambda t: t.zero_(),
    "copy_": lambda t: t.copy_(torch.tensor(4.0)),
    "out": lambda t: torch.add(t, 1, out=t),
    "twice": lambda t: t.add_(1).mul_(2),
}


def compiled_and_eager(
    step: Callable, backend: str = "aot_eager"
) -> list[tuple[float, float]]:
    """The loss and the scalar after each of three steps that are compiled, then of three in eager mode."""
    torch._dynamo.reset()
    ended = []
    for run in (torch.compile(step, backend=backend), step):
        weight, scalar = (
            torch.ones(3, requires_grad=True),
            torch.tensor(2.0, dtype=torch.float64),
        )
        rows = []
        for _ in range(3):
            loss = run(weight, scalar)
            loss.backward()
            rows.append((loss.item(), scalar.item()))
        ended.append(rows)
    return ended


class ScalarTest(unittest.TestCase):
    def test_writes(self) -> None:
        for name, write in WRITES.items():
            with self.subTest(name):

                def step(weight: torch.Tensor, scalar: torch.Tensor) -> torch.Tensor:
                    with torch.no_grad():
                        write(scalar)  # noqa: B023
                    return weight.sum()

                self.assertEqual(*compiled_and_eager(step))

    def test_inductor(self) -> None:
        def step(weight: torch.Tensor, scalar: torch.Tensor) -> torch.Tensor:
            scalar.add_(1)
            return weight.sum()

        self.assertEqual(*compiled_and_eager(step, "inductor"))

    def test_the_value_after_a_write(self) -> None:
        def step(weight: torch.Tensor, scalar: torch.Tensor) -> torch.Tensor:
            before = scalar.item()
            scalar.add_(1)
            return (weight * before * scalar.item()).sum()

        with mock.patch.object(torch._dynamo.config, "capture_scalar_outputs", True):
            self.assertEqual(*compiled_and_eager(step))

    def test_a_number_that_changes_is_still_an_input(self) -> None:
        graphs = []

        def keep(graph: torch.fx.GraphModule, inputs: object) -> object:
            graphs.append(graph)
            return graph

        torch._dynamo.reset()
        backend = aot_autograd(fw_compiler=keep)
        scale = torch.compile(
            lambda weight, number: (weight * number).sum(), backend=backend
        )
        got = [
            scale(torch.ones(3, requires_grad=True), number).item()
            for number in (1.5, 2.5, 3.5, 4.5)
        ]
        self.assertEqual((got, len(graphs)), ([4.5, 7.5, 10.5, 13.5], 2))


if __name__ == "__main__":
    unittest.main()

"""Random operations in a function that needs gradients: two calls with the same arguments draw two times."""

import unittest

import torch
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.nn import functional as F


OPERATIONS = {
    "randn_like": torch.randn_like,
    "randint_like": lambda t: torch.randint_like(t, 1000),
    "normal_": lambda t: t.clone().normal_(),
    "uniform_": lambda t: t.clone().uniform_(),
    "exponential_": lambda t: t.clone().exponential_(),
    "cauchy_": lambda t: t.clone().cauchy_(),
    "log_normal_": lambda t: t.clone().log_normal_(),
    "geometric_": lambda t: t.clone().geometric_(0.001),
    "rrelu": lambda t: F.rrelu(t - 1, training=True),
}
# Inductor replaces the other ones before the pass, by operations that it spares.
MERGED_BY_INDUCTOR = ("normal_", "uniform_", "rrelu")


class RandomOperationsTest(unittest.TestCase):
    def difference(self, name: str, backend: str) -> tuple[float, float]:
        """The sum of the differences of two draws, compiled and in eager mode with the same seed."""
        operation = OPERATIONS[name]

        def difference(weight: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
            return (weight * (operation(like) - operation(like)).abs()).sum()

        torch._dynamo.reset()
        arguments = torch.ones(50, requires_grad=True), torch.zeros(50)
        torch.manual_seed(1)
        got = torch.compile(difference, backend=backend)(*arguments)
        got.backward()
        torch.manual_seed(1)
        return got.item(), difference(*arguments).item()

    def test_values_of_eager_mode(self) -> None:
        for name in OPERATIONS:
            with self.subTest(name):
                got, wanted = self.difference(name, "aot_eager")
                self.assertNotEqual(wanted, 0)
                self.assertAlmostEqual(got, wanted, delta=1e-5 * wanted)

    def test_inductor(self) -> None:
        for name in MERGED_BY_INDUCTOR:
            with self.subTest(name):
                self.assertNotEqual(self.difference(name, "inductor")[0], 0)

    def test_equal_operations_that_are_not_random_still_become_one(self) -> None:
        graphs = []

        def keep(graph: torch.fx.GraphModule, inputs: object) -> object:
            graphs.append(graph)
            return graph

        def twice(weight: torch.Tensor) -> torch.Tensor:
            return (weight.exp() + weight.exp()).sum()

        torch._dynamo.reset()
        backend = aot_autograd(
            fw_compiler=keep, partition_fn=min_cut_rematerialization_partition
        )
        torch.compile(twice, backend=backend)(torch.ones(3, requires_grad=True))
        exponentials = [
            node
            for node in graphs[0].graph.nodes
            if node.target is torch.ops.aten.exp.default
        ]
        self.assertEqual(len(exponentials), 1)


if __name__ == "__main__":
    unittest.main()

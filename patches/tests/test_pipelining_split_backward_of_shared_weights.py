"""Weights that several layers share, in a backward that is split into inputs and weights."""

import itertools
import unittest

import torch
from pipelining_stages import wrong
from torch import nn


def two_layers(weights: dict[str, nn.Parameter], inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    hidden = nn.functional.linear(inputs[0], weights["first"]) + weights["shared"]
    return [nn.functional.linear(torch.tanh(hidden), weights["second"]) + weights["shared"]]


def shared_layer(weights: dict[str, nn.Parameter], inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    """The same layer before and after another one."""
    hidden = torch.tanh(nn.functional.linear(inputs[0], weights["shared"]))
    return [nn.functional.linear(torch.tanh(nn.functional.linear(hidden, weights["first"])), weights["shared"])]


def layers_of_two_weights(weights: dict[str, nn.Parameter], inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    hidden = inputs[0] * (weights["first"] + weights["shared"])
    return [torch.tanh(hidden) * (weights["second"] + weights["shared"]), inputs[0] * weights["third"]]


def sums(weights: dict[str, nn.Parameter], inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    """Nothing is saved for this backward, so that a second one does not fail."""
    return [inputs[0] + (weights["first"] + weights["shared"]) + (weights["second"] + weights["shared"])]


class SharedWeightsTest(unittest.TestCase):
    def test_in_any_order(self) -> None:
        for forward, names in (
            (shared_layer, ("first", "shared")),
            (two_layers, ("first", "second", "shared")),
            (layers_of_two_weights, ("first", "second", "shared", "third")),
            (sums, ("first", "second", "shared")),
        ):
            for order in itertools.permutations(names):
                with self.subTest(forward=forward.__name__, order=order):
                    self.assertEqual(wrong(list(order), [True], forward), [])


if __name__ == "__main__":
    unittest.main()

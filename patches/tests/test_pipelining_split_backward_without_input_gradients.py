"""Weights that reach an output on a way without inputs, in a backward that is split into inputs and weights."""

import unittest

import ranks
import torch
from pipelining_stages import wrong
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleInterleavedZeroBubble, ScheduleZBVZeroBubble

Tensors = list[torch.Tensor]
Weights = dict[str, nn.Parameter]


def layers(weights: Weights, inputs: Tensors) -> Tensors:
    hidden = torch.tanh(nn.functional.linear(inputs[0], weights["first"]))
    return [torch.tanh(nn.functional.linear(hidden, weights["second"]))]


def hidden_too(weights: Weights, inputs: Tensors) -> Tensors:
    """One output depends on the other."""
    hidden = torch.tanh(nn.functional.linear(inputs[0], weights["first"]))
    return [hidden + 0, nn.functional.linear(hidden, weights["second"])]


def two_inputs(weights: Weights, inputs: Tensors) -> Tensors:
    return [inputs[0] @ weights["first"], torch.tanh(inputs[1] @ weights["second"])]


def weights_alone(weights: Weights, inputs: Tensors) -> Tensors:
    """A part of the weights is passed on, as well as used."""
    both = weights["first"] * weights["second"]
    return [inputs[0] * both, both.sum(), inputs[0].detach()]


def parts(weights: Weights, inputs: Tensors) -> Tensors:
    """Outputs of one node."""
    return list(torch.var_mean(inputs[0] @ weights["first"] * weights["second"], 0))


def behind_a_frozen_stage(rank: int, kind: type, count: int) -> list[bool]:
    """Train all stages but the first; return whether the gradients of this rank's stages are right."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(2, 2), nn.Tanh()) for _ in range(count)])
    model[0].requires_grad_(False)
    batch, target = torch.randn(4, 2), torch.randn(4, 2)
    loss = nn.MSELoss(reduction="sum")
    loss(model(batch), target).backward()
    numbers = (rank, 3 - rank)[: count // 2]
    wanted = [model[number][0].weight.grad for number in numbers]
    model.zero_grad()
    stages = [PipelineStage(model[number], number, count, torch.device("cpu")) for number in numbers]
    kind(stages, 2, loss_fn=loss, scale_grads=False).step(*([batch] if rank == 0 else []), target=target)
    got = [model[number][0].weight.grad for number in numbers]
    return [one is other is None or torch.allclose(one, other) for one, other in zip(got, wanted, strict=True)]


class WithoutInputGradientsTest(unittest.TestCase):
    def test_of_any_input(self) -> None:
        for forward in (layers, hidden_too, weights_alone, parts):
            for trained in (False, True):
                with self.subTest(forward=forward.__name__, trained=trained):
                    self.assertEqual(wrong(["first", "second"], [trained], forward), [])

    def test_of_one_input(self) -> None:
        for trained in ([False, False], [True, False], [False, True], [True, True]):
            with self.subTest(trained=trained):
                self.assertEqual(wrong(["first", "second"], trained, two_inputs), [])

    def test_of_a_weight_that_is_passed_on(self) -> None:
        self.assertEqual(wrong(["only"], [True], lambda weights, inputs: [weights["only"] + 0, inputs[0] * 2]), [])

    def test_behind_a_frozen_stage(self) -> None:
        for kind, count in ((ScheduleInterleavedZeroBubble, 2), (ScheduleZBVZeroBubble, 4)):
            with self.subTest(kind=kind.__name__):
                found = ranks.run(2, lambda rank, kind=kind, count=count: behind_a_frozen_stage(rank, kind, count))
                self.assertEqual(found, [[True] * (count // 2)] * 2)


if __name__ == "__main__":
    unittest.main()

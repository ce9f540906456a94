# Owner(s): ["oncall: distributed"]
# In PyTorch: test/distributed/pipelining/test_backward.py

import itertools

import torch
from torch.distributed.pipelining._backward import (
    stage_backward_input,
    stage_backward_weight,
)
from torch.testing._internal.common_device_type import instantiate_device_type_tests
from torch.testing._internal.common_utils import run_tests, TestCase


class StageBackwardTests(TestCase):
    def test_stage_backward_weight_shared_by_layers(self, device):
        # Weights that join the path of the input in several places: a layer with
        # another one in between, biases, factors, and sums, which save nothing.
        linear = torch.nn.functional.linear

        def same_layer(x, shared, first, second):
            return linear(
                torch.tanh(linear(torch.tanh(linear(x, shared)), first)), shared
            )

        def biases(x, shared, first, second):
            return linear(torch.tanh(linear(x, first) + shared), second) + shared

        def factors(x, shared, first, second):
            return torch.tanh(x * (first + shared)) * (second + shared)

        def sums(x, shared, first, second):
            return x + (first + shared) + (second + shared)

        for forward in (same_layer, biases, factors, sums):
            # The groups of weights depend on the order of the parameters
            for order in itertools.permutations(range(3)):
                weights = [
                    torch.nn.Parameter(torch.randn(3, 3, device=device))
                    for _ in range(3)
                ]
                x = torch.randn(3, 3, device=device, requires_grad=True)
                output_grad = torch.randn(3, 3, device=device)
                ref_grads = torch.autograd.grad(
                    forward(x, *weights),
                    [x, *weights],
                    output_grad,
                    allow_unused=True,
                )

                ordered = [weights[index] for index in order]
                dinputs, param_groups = stage_backward_input(
                    stage_outputs_or_loss=[forward(x, *weights)],
                    output_grads=[output_grad],
                    input_values=[x],
                    weights=iter(ordered),
                )
                stage_backward_weight(iter(ordered), param_groups)

                self.assertEqual(dinputs[0], ref_grads[0])
                for weight, ref_grad in zip(weights, ref_grads[1:]):
                    self.assertEqual(weight.grad, ref_grad)


instantiate_device_type_tests(StageBackwardTests, globals(), allow_xpu=True)

if __name__ == "__main__":
    run_tests()

# Owner(s): ["oncall: distributed"]
# In PyTorch: test/distributed/pipelining/test_backward.py

import copy
import itertools

import torch
from torch.distributed.pipelining import (
    PipelineStage,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)
from torch.distributed.pipelining._backward import (
    stage_backward_input,
    stage_backward_weight,
)
from torch.testing._internal.common_device_type import instantiate_device_type_tests
from torch.testing._internal.common_distributed import MultiProcContinuousTest
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
    run_tests,
    TestCase,
)


class StageBackwardTests(TestCase):
    def test_stage_backward_weight_without_input_grads(self, device):
        # Weights that reach an output on a way without an input that needs gradients
        def layers(x, y, first, second):
            return [torch.tanh(torch.tanh(x @ first) @ second)]

        def output_of_output(x, y, first, second):
            hidden = torch.tanh(x @ first)
            return [hidden + 0, hidden @ second]

        def two_inputs(x, y, first, second):
            return [x @ first, torch.tanh(y @ second)]

        def weights_alone(x, y, first, second):
            both = first * second
            return [x * both, both.sum(), x.detach()]

        def weight_passed_on(x, y, first, second):
            return [first + 0, x * 2 + y, second * y]

        def outputs_of_one_node(x, y, first, second):
            return list(torch.var_mean(x @ first * second, 0))

        for forward, x_trains, y_trains in itertools.product(
            (
                layers,
                output_of_output,
                two_inputs,
                weights_alone,
                weight_passed_on,
                outputs_of_one_node,
            ),
            (False, True),
            (False, True),
        ):
            weights = [
                torch.nn.Parameter(torch.randn(3, 3, device=device)) for _ in range(2)
            ]
            inputs = [
                torch.randn(3, 3, device=device, requires_grad=trains)
                for trains in (x_trains, y_trains)
            ]
            outputs = forward(*inputs, *weights)
            output_grads = [torch.randn_like(output) for output in outputs]
            leaves = [leaf for leaf in (*inputs, *weights) if leaf.requires_grad]
            trained = [index for index, out in enumerate(outputs) if out.requires_grad]
            ref_grads = torch.autograd.grad(
                [outputs[index] for index in trained],
                leaves,
                [output_grads[index] for index in trained],
                allow_unused=True,
            )

            _, param_groups = stage_backward_input(
                stage_outputs_or_loss=forward(*inputs, *weights),
                output_grads=output_grads,
                input_values=inputs,
                weights=iter(weights),
            )
            stage_backward_weight(iter(weights), param_groups)
            for leaf, ref_grad in zip(leaves, ref_grads):
                self.assertEqual(leaf.grad, ref_grad)


instantiate_device_type_tests(StageBackwardTests, globals(), allow_xpu=True)


class SplitBackwardBehindFrozenStageTest(MultiProcContinuousTest):
    world_size = 2

    @classmethod
    def backend_str(cls) -> str:
        return "gloo"

    @parametrize(
        "ScheduleClass", [ScheduleInterleavedZeroBubble, ScheduleZBVZeroBubble]
    )
    def test_grads(self, ScheduleClass):
        n_stages = 2 if ScheduleClass is ScheduleInterleavedZeroBubble else 4
        torch.manual_seed(0)
        full_mod = torch.nn.Sequential(
            *[
                torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Tanh())
                for _ in range(n_stages)
            ]
        )
        full_mod[0].requires_grad_(False)
        ref_mod = copy.deepcopy(full_mod)
        x, target = torch.randn(4, 2), torch.randn(4, 2)
        loss_fn = torch.nn.MSELoss(reduction="sum")
        loss_fn(ref_mod(x), target).backward()

        indices = (self.rank, 3 - self.rank)[: n_stages // 2]
        stages = [
            PipelineStage(full_mod[index], index, n_stages, torch.device("cpu"))
            for index in indices
        ]
        schedule = ScheduleClass(stages, 2, loss_fn=loss_fn, scale_grads=False)
        schedule.step(*([x] if self.rank == 0 else []), target=target)
        for stage in stages:
            ref_submod = ref_mod[stage.stage_index]
            for name, p in stage.submod.named_parameters():
                self.assertEqual(p.grad, ref_submod.get_parameter(name).grad)


instantiate_parametrized_tests(SplitBackwardBehindFrozenStageTest)

if __name__ == "__main__":
    run_tests()

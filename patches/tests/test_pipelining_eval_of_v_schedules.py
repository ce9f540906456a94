# Owner(s): ["oncall: distributed"]
# In PyTorch: test/distributed/pipelining/test_schedule_multiproc.py

import copy

import torch
from torch.distributed.pipelining import (
    PipelineStage,
    ScheduleDualPipeV,
    ScheduleZBVZeroBubble,
)
from torch.testing._internal.common_distributed import MultiProcContinuousTest
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
    run_tests,
)


class VScheduleEvalTest(MultiProcContinuousTest):
    world_size = 2

    @classmethod
    def backend_str(cls) -> str:
        return "gloo"

    @parametrize("ScheduleClass", [ScheduleZBVZeroBubble, ScheduleDualPipeV])
    def test_eval_before_and_after_step(self, ScheduleClass):
        # Stages 1 and 2 are in rank 1, and pass tensors to each other there
        torch.manual_seed(0)
        full_mod = torch.nn.Sequential(*[torch.nn.Linear(2, 2) for _ in range(4)])
        ref_mod = copy.deepcopy(full_mod)
        x, target = torch.randn(8, 2), torch.randn(8, 2)
        loss_fn = torch.nn.MSELoss(reduction="sum")
        ref_out = ref_mod(x)
        loss_fn(ref_out, target).backward()

        stages = [
            PipelineStage(full_mod[index], index, 4, torch.device("cpu"))
            for index in (self.rank, 3 - self.rank)
        ]
        schedule = ScheduleClass(stages, 4, loss_fn=loss_fn, scale_grads=False)
        args, kwargs = ((x,), {"target": target}) if self.rank == 0 else ((), {})
        for run in (schedule.eval, schedule.step, schedule.eval):
            out = run(*args, **kwargs)
            if self.rank == 0:
                self.assertEqual(out, ref_out)

        for stage in stages:
            ref_submod = ref_mod[stage.stage_index]
            for name, p in stage.submod.named_parameters():
                self.assertEqual(p.grad, ref_submod.get_parameter(name).grad)


instantiate_parametrized_tests(VScheduleEvalTest)

if __name__ == "__main__":
    run_tests()

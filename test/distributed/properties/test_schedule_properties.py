"""Train random models under every pipeline schedule: outputs, losses and gradients are those of one device."""

import copy
from dataclasses import replace

import schedule_examples as examples
import torch
import torch.distributed as dist
from hypothesis import strategies as st
from schedule_models import Part, run_all, stages_of, values
from torch.distributed import pipelining
from torch.distributed.pipelining import PipelineStage

from torch_testing_ext.common_distributed import MultiProcessTestCase, requires_gloo
from torch_testing_ext.common_utils import run_tests
from torch_testing_ext.hypothesis_utils import assume, given, replay, settings

PROFILE = settings(max_examples=40, database=None, derandomize=True)
SIZES = (1, 2, 3, 5)
# One stage per rank; any number, dealt to the ranks in turn; two, in the shape of a V.
SINGLE = ("ScheduleGPipe", "Schedule1F1B")
LOOPED = ("ScheduleLoopedBFS", "ScheduleInterleaved1F1B", "ScheduleInterleavedZeroBubble")
V_SHAPED = ("ScheduleZBVZeroBubble", "ScheduleDualPipeV")
# These compute the gradients of inputs and of weights apart from each other.
SPLIT = ("ScheduleInterleavedZeroBubble", *V_SHAPED)
# Before torch 2.12, adjacent stages in one rank fail over gloo.
TAKES_V_SHAPES = torch.__version__ >= (2, 12)
# Before torch 2.13, stages send gradients to frozen ones.
TAKES_FROZEN_STAGES = torch.__version__ >= (2, 13)


PARTS = st.builds(
    Part,
    size=st.sampled_from(SIZES),
    bias=st.booleans(),
    activation=st.sampled_from(["Identity", "Tanh", "ReLU"]),
    outputs=st.integers(1, 2),
    frozen=st.booleans(),
)


def squares(output, target):
    return ((output - target) ** 2).sum()


def mean_of_squares(output, target):
    return ((output - target) ** 2).mean()


def accepts(schedule, microbatches, stages, ranks):
    """Whether a schedule takes so many microbatches."""
    if schedule in ("ScheduleInterleaved1F1B", "ScheduleInterleavedZeroBubble"):
        return microbatches % max(1, microbatches // ranks) == 0
    return microbatches >= stages if schedule in ("Schedule1F1B", "ScheduleDualPipeV") else True


@requires_gloo()
class TestSchedules(MultiProcessTestCase):
    world_size = 2

    def setUp(self):
        super().setUp()
        self._spawn_processes()

    def mine(self, schedule, count):
        """Return the numbers of the stages in this rank."""
        rank, size = dist.get_rank(), self.world_size
        return [rank, count - 1 - rank] if schedule in V_SHAPED else list(range(rank, count, size))

    def build(self, schedule, stages, numbers, microbatches, **options):
        cpu = torch.device("cpu")
        mine = [PipelineStage(stages[number], number, len(stages), cpu) for number in numbers]
        return getattr(pipelining, schedule)(mine[0] if schedule in SINGLE else mine, microbatches, **options)

    def check_same(self, mine, reference):
        for number, stage in mine.items():
            for (name, parameter), wanted in zip(stage.named_parameters(), reference[number].parameters(), strict=True):
                message = f"{name} of stage {number}"
                self.assertEqual(parameter, wanted, msg=message)
                self.assertEqual(parameter.grad is None, wanted.grad is None, msg=f"gradient of {message}")
                if wanted.grad is not None:
                    self.assertEqual(parameter.grad, wanted.grad, msg=f"gradient of {message}")

    @PROFILE
    @replay(examples.TRAINING)
    @given(
        schedule=st.sampled_from(SINGLE + LOOPED + V_SHAPED),
        stages_per_rank=st.integers(1, 3),
        microbatches=st.integers(1, 7),
        rows=st.integers(1, 2),
        inputs=st.sampled_from(SIZES),
        parts=st.lists(PARTS, min_size=1, max_size=3),
        mean=st.booleans(),
        scaled=st.booleans(),
        steps=st.integers(1, 2),
        evaluated=st.booleans(),
    )
    def test_training(
        self, schedule, stages_per_rank, microbatches, rows, inputs, parts, mean, scaled, steps, evaluated
    ):
        assume(TAKES_V_SHAPES or schedule not in V_SHAPED)
        if schedule in SPLIT:
            # Behind frozen stages, weights get no gradients (docs/found/pipeline_split_backward_of_frozen_inputs.py).
            parts = [replace(parts[0], frozen=False), *parts[1:]]
        if not TAKES_FROZEN_STAGES:
            parts = [replace(part, frozen=False) for part in parts]
        per_rank = 1 if schedule in SINGLE else 2 if schedule in V_SHAPED else stages_per_rank
        count = per_rank * self.world_size
        reference = stages_of(count, inputs, parts)
        numbers = self.mine(schedule, count)
        stages = copy.deepcopy(reference)
        loss_fn = mean_of_squares if mean else squares
        build = {"loss_fn": loss_fn, "scale_grads": mean}
        if not accepts(schedule, microbatches, count, self.world_size):
            with self.assertRaises(ValueError):
                self.build(schedule, stages, numbers, microbatches, **build)
            return
        pipeline = self.build(schedule, stages, numbers, microbatches, **build)
        mine = {number: stages[number] for number in numbers}
        optimizers = [
            torch.optim.SGD([one for stage in trained for one in stage.parameters()], lr=0.125, momentum=0.5)
            for trained in (reference, mine.values())
        ]
        # eval() of the V-shaped schedules fails (docs/found/pipeline_eval_of_v_schedules.py).
        for step in range(steps + (evaluated and schedule not in V_SHAPED)):
            trains = step < steps
            batch = values((microbatches * rows, inputs), 3 * step)
            target = values((microbatches * rows, reference[-1].linear.out_features), 5 * step + 1)
            options = {"scale": values((microbatches * rows, 1), step)} if scaled else {}
            wanted = run_all(reference, batch, options)
            losses = []
            run = pipeline.step if trains else pipeline.eval
            outputs = run(
                *([batch] if 0 in mine else []),
                target=target if count - 1 in mine else None,
                losses=losses,
                **options,
            )
            if count - 1 in mine:
                self.assertEqual(outputs, wanted)
                chunks = zip(wanted.chunk(microbatches), target.chunk(microbatches), strict=True)
                self.assertEqual(torch.stack(losses), torch.stack([loss_fn(*chunk) for chunk in chunks]))
            if trains:
                if wanted.requires_grad:
                    loss_fn(wanted, target).backward()
                self.check_same(mine, reference)
                for optimizer in optimizers:
                    optimizer.step()
                    optimizer.zero_grad()
            self.check_same(mine, reference)


class TestSchedulesOnThreeRanks(TestSchedules):
    world_size = 3


if __name__ == "__main__":
    run_tests()

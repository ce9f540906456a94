"""pipelining: `eval` of the V-shaped schedules fails ("can't steal_bwd_input if this stage doesn't have backward").

From a stage to an adjacent one in the same rank, schedules pass gradients on also if there are none. Only the V-shaped
ones put adjacent stages into one rank if there are several ranks, so the others evaluate.

Seen on torch 2.13.0 and 2.15.0. Found by test/distributed/pipelining/test_schedule_properties.py. Run this file: it
prints what each schedule returned, and exits with 1 if one failed or returned a wrong value.
"""

import copy
import sys
import tempfile

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import pipelining


def evaluate(name: str) -> bool:
    """Evaluate two stages in this rank, and return whether the schedule returns the right output."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
    batch = torch.ones(2, 1)
    stages = [
        pipelining.PipelineStage(copy.deepcopy(module), number, 2, torch.device("cpu"))
        for number, module in enumerate(model)
    ]
    schedule = getattr(pipelining, name)(stages, 2, loss_fn=nn.functional.mse_loss)
    try:
        output = schedule.eval(batch, target=torch.zeros(2, 1))
    except AssertionError as error:
        print(f"{name}: {error}")
        return False
    print(f"{name}: {output.flatten().tolist()}, should be {model(batch).flatten().tolist()}")
    return torch.allclose(output, model(batch))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as directory:
        dist.init_process_group("gloo", store=dist.FileStore(f"{directory}/store", 1), rank=0, world_size=1)
        right = [evaluate(name) for name in ("ScheduleZBVZeroBubble", "ScheduleDualPipeV")]
        dist.destroy_process_group()
    sys.exit(not all(right))

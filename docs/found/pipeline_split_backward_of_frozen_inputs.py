"""pipelining: behind frozen stages, the weights of a stage get no gradients from zero-bubble schedules, without an error.

These schedules compute the gradients of inputs first, and those of weights later, from where the inputs joined them. If
no input of a stage requires a gradient, `get_param_groups` (torch/distributed/pipelining/_backward.py) returns no
group, and all weights of the stage are left out. So a model whose first stage is frozen does not train.

Seen on torch 2.13.0 and 2.15.0. Found by test/distributed/pipelining/test_schedule_properties.py. Run this file: it
prints the gradient of the second of two stages, and exits with 1 if a schedule computes another one or none.
"""

import copy
import sys
import tempfile

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import pipelining


def train(name: str) -> bool:
    """Train two stages in this rank, and return whether the second one has the right gradient."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1, 1).requires_grad_(False), nn.Linear(1, 1))
    batch, target = torch.ones(2, 1), torch.zeros(2, 1)
    trained = copy.deepcopy(model)
    stages = [
        pipelining.PipelineStage(module, number, 2, torch.device("cpu")) for number, module in enumerate(trained)
    ]
    schedule = getattr(pipelining, name)(stages, 2, loss_fn=nn.functional.mse_loss)
    schedule.step(batch, target=target)
    nn.functional.mse_loss(model(batch), target).backward()
    got, wanted = trained[1].weight.grad, model[1].weight.grad
    print(f"{name}: gradient {got}, should be {wanted}")
    return got is not None and wanted is not None and torch.allclose(got, wanted)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as directory:
        dist.init_process_group("gloo", store=dist.FileStore(f"{directory}/store", 1), rank=0, world_size=1)
        names = ("ScheduleInterleaved1F1B", "ScheduleInterleavedZeroBubble", "ScheduleZBVZeroBubble")
        right = [train(name) for name in names]
        dist.destroy_process_group()
    sys.exit(not all(right))

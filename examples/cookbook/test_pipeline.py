"""Two pipeline stages have the loss and the gradients of the whole model.

Run it: pytest examples/cookbook/test_pipeline.py
"""

import pytest
import torch
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe


def make_layers():
    torch.manual_seed(0)
    return [torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)]


def loss_of(output, target):
    return (output - target).square().mean()


@pytest.mark.world_size(2)
@pytest.mark.parametrize("schedule", [ScheduleGPipe, Schedule1F1B])
def test_two_stages(dist_env, schedule):
    device, rank = dist_env.device, dist_env.rank
    batch, target = torch.linspace(-1, 1, 4 * 8).reshape(4, 8).to(device), torch.zeros(4, 8, device=device)
    alone = torch.nn.Sequential(*make_layers()).to(device)
    loss_of(alone(batch), target).backward()

    layer = make_layers()[rank].to(device)
    stage = PipelineStage(layer, rank, num_stages=2, device=device)
    pipeline = schedule(stage, n_microbatches=2, loss_fn=loss_of)
    if rank == 0:
        pipeline.step(batch)
    else:
        losses = []
        pipeline.step(target=target, losses=losses)
        torch.testing.assert_close(torch.stack(losses).mean(), loss_of(alone(batch), target))
    torch.testing.assert_close(layer.weight.grad, alone[rank].weight.grad)

"""pipelining: behind frozen stages, zero-bubble schedules silently compute no gradients for the weights of a stage.

These schedules compute the gradients of inputs first, and those of weights later, from where the inputs joined them. If
no input of a stage requires a gradient, `get_param_groups` (torch/distributed/pipelining/_backward.py) returns no
group, and all weights of the stage are left out. So a model whose first stages are frozen does not train.

Seen on torch 2.13 to 2.15; 2.11 is right, and 2.12 raises an error for any frozen stage. Found by
test/distributed/properties/test_schedule_properties.py. Run this file: it prints the gradient of each of two stages,
and exits with 1 if a schedule computes another one or none.
"""

import sys
import tempfile
from multiprocessing import get_context

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleInterleaved1F1B, ScheduleInterleavedZeroBubble


def train(rank: int, file: str) -> bool:
    """Train the stage of this rank, and return whether each schedule computes the right gradient."""
    dist.init_process_group("gloo", store=dist.FileStore(file, 2), rank=rank, world_size=2)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1, 1).requires_grad_(False), nn.Linear(1, 1))
    batch, target = torch.ones(2, 1), torch.zeros(2, 1)
    nn.functional.mse_loss(model(batch), target).backward()
    wanted, right = model[rank].weight.grad, True
    for kind in (ScheduleInterleaved1F1B, ScheduleInterleavedZeroBubble):
        model.zero_grad()
        stage = PipelineStage(model[rank], rank, 2, torch.device("cpu"))
        kind([stage], 2, loss_fn=nn.functional.mse_loss).step(*([batch] if rank == 0 else []), target=target)
        got = model[rank].weight.grad
        print(f"rank {rank}, {kind.__name__}: gradient {got}, should be {wanted}", flush=True)
        right = right and (got is wanted is None or (got is not None and torch.allclose(got, wanted)))
    dist.barrier()  # the other rank may still be receiving
    return right


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as directory:
        other = get_context("fork").Process(target=train, args=(0, f"{directory}/store"), daemon=True)
        other.start()
        right = train(1, f"{directory}/store")
        other.join()
    sys.exit(not right)

"""pipelining: a stage fails if the gradient of what it passes on is a view that is not contiguous.

The gradient that `torch.cat` returns for each of its inputs is such a view. The stage that receives it allocates its
buffer with the strides of the view, which gloo refuses ("input tensor has to be contiguous").

Seen on torch 2.12 to 2.15; 2.11 is right. Found by
test/distributed/properties/test_schedule_properties.py. Run this file: it prints the gradient of the
first of two stages, and exits with 1 if there is none.
"""

import sys
import tempfile
from multiprocessing import get_context

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe


class First(nn.Linear):
    """Pass on two tensors."""

    def forward(self, tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = super().forward(tensor)
        return hidden, hidden * 2


class Second(nn.Linear):
    """Put both side by side."""

    def forward(self, *tensors: torch.Tensor) -> torch.Tensor:
        return super().forward(torch.cat(tensors, dim=-1))


def train(rank: int, file: str) -> bool:
    """Train one step in a rank, and return whether its stage has the right gradient."""
    dist.init_process_group("gloo", store=dist.FileStore(file, 2), rank=rank, world_size=2)
    torch.manual_seed(0)
    stages = [First(1, 1), Second(2, 1)]
    batch, target = torch.ones(2, 1), torch.zeros(2, 1)
    nn.functional.mse_loss(stages[1](*stages[0](batch)), target).backward()
    wanted = stages[rank].weight.grad
    stages[rank].zero_grad()
    stage = PipelineStage(stages[rank], rank, 2, torch.device("cpu"))
    schedule = ScheduleGPipe(stage, 1, loss_fn=nn.functional.mse_loss)
    try:
        schedule.step(*([batch] if rank == 0 else []), target=target)
    except RuntimeError as error:
        if "has to be contiguous" not in str(error):
            raise
        print(f"rank {rank}: {error}, instead of the gradient {wanted}", flush=True)
        return False
    dist.barrier()  # the other rank may still be receiving
    got = stages[rank].weight.grad
    print(f"rank {rank}: gradient {got}, should be {wanted}", flush=True)
    return got is not None and wanted is not None and torch.allclose(got, wanted)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as directory:
        other = get_context("fork").Process(target=train, args=(1, f"{directory}/store"), daemon=True)
        other.start()
        right = train(0, f"{directory}/store")
        # After a failure here, the other rank would wait until its time-out.
        other.kill()
        other.join()
    sys.exit(not right)

"""pipelining: zero-bubble schedules fail if a stage uses a layer twice, or add the gradients of its weights twice.

These schedules compute the gradients of inputs first, and those of weights later, group by group. A group runs from the
nodes at which its weights join the inputs. If a weight joins them at several nodes, the pass of its group goes through
the nodes of other groups in between and frees their tensors, so that the other groups fail ("Trying to backward through
the graph a second time"). If such a weight connects two groups, the weights of the first are in both of them.

Seen on torch 2.11 to 2.15. patches/0011-pipelining-split-backward-of-shared-weights.patch corrects it.
Near: pytorch/pytorch#180952. Run this file: it prints the gradients of the second of two stages, and exits with 1 if
one is wrong or if there are none.
"""

import sys
import tempfile
from multiprocessing import get_context

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleInterleavedZeroBubble


class Twice(nn.Module):
    """Use the same layer before and after another one."""

    def __init__(self) -> None:
        super().__init__()
        self.shared, self.other = nn.Linear(1, 1), nn.Linear(1, 1)

    def forward(self, tensor: torch.Tensor) -> torch.Tensor:
        return self.shared(self.other(self.shared(tensor)))


def train(rank: int, file: str) -> bool:
    """Train the stage of this rank, and return whether its gradients are right."""
    dist.init_process_group("gloo", store=dist.FileStore(file, 2), rank=rank, world_size=2)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1, 1), Twice())
    batch, target = torch.ones(2, 1), torch.zeros(2, 1)
    nn.functional.mse_loss(model(batch), target).backward()
    wanted = [parameter.grad for parameter in model[rank].parameters()]
    model.zero_grad()
    stage = PipelineStage(model[rank], rank, 2, torch.device("cpu"))
    schedule = ScheduleInterleavedZeroBubble([stage], 2, loss_fn=nn.functional.mse_loss)
    try:
        schedule.step(*([batch] if rank == 0 else []), target=target)
    except RuntimeError as error:
        if "backward through the graph a second time" not in str(error):
            raise
        print(f"rank {rank}: {str(error)[:60]}", flush=True)
        return False
    dist.barrier()  # the other rank may still be receiving
    got = [parameter.grad for parameter in model[rank].parameters()]
    print(f"rank {rank}: gradients {got}, should be {wanted}", flush=True)
    return all(
        one is not None and other is not None and torch.allclose(one, other)
        for one, other in zip(got, wanted, strict=True)
    )


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as directory:
        other = get_context("fork").Process(target=train, args=(0, f"{directory}/store"), daemon=True)
        other.start()
        right = train(1, f"{directory}/store")
        # After a failure here, the other rank may wait until its time-out.
        other.kill()
        other.join()
    sys.exit(not right)

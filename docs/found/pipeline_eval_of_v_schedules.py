"""pipelining: `eval` of the V-shaped schedules fails ("can't steal_bwd_input if this stage doesn't have backward").

From a stage to an adjacent one in the same rank, schedules pass gradients on also if there are none. Only
ScheduleZBVZeroBubble and ScheduleDualPipeV put adjacent stages into one rank of several.

Seen on torch 2.12 to 2.15 (on 2.11, these schedules do not run over gloo at all). Found by
test/distributed/properties/test_schedule_properties.py. Run this file: it prints what the schedule did in the rank of
the two middle stages, and exits with 1 if it failed.
"""

import sys
import tempfile
from multiprocessing import get_context

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleZBVZeroBubble


def evaluate(rank: int, file: str) -> bool:
    """Evaluate four stages, two of which are in this rank, and return whether that works."""
    dist.init_process_group("gloo", store=dist.FileStore(file, 2), rank=rank, world_size=2)
    stages = [PipelineStage(nn.Linear(1, 1), number, 4, torch.device("cpu")) for number in (rank, 3 - rank)]
    schedule = ScheduleZBVZeroBubble(stages, 2, loss_fn=nn.functional.mse_loss)
    try:
        schedule.eval(*([torch.ones(2, 1)] if rank == 0 else []), target=torch.zeros(2, 1))
    except (AssertionError, RuntimeError) as error:
        if "can't steal_bwd_input" not in str(error):
            raise
        print(f"eval: {error}", flush=True)
        return False
    dist.barrier()  # the other rank may still be receiving
    print("eval: done", flush=True)
    return True


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as directory:
        other = get_context("fork").Process(target=evaluate, args=(0, f"{directory}/store"), daemon=True)
        other.start()
        right = evaluate(1, f"{directory}/store")
        # After a failure here, the other rank would wait until its time-out.
        other.kill()
        other.join()
    sys.exit(not right)

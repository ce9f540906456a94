"""gloo: a second wait() for a receive never ends, while a second wait() for any collective returns at once.

The work of a receive waits for its buffer in each wait(), and the buffer tells of one arrival once. The work of a
collective remembers that it has ended.

Seen on torch 2.11 to 2.15. Found by test/distributed/properties/test_c10d_properties.py, which shrank it
to the program [send_recv(1)]. Run this file: it prints what each wait did, and exits with 1 if the second one did not
end.
"""

import sys
import tempfile
from datetime import timedelta
from multiprocessing import get_context

import torch
import torch.distributed as dist


def wait_twice(rank: int, file: str) -> bool:
    """Wait twice, and return whether the second wait ends."""
    store = dist.FileStore(file, 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=60))
    if rank == 0:
        dist.send(torch.ones(1), 1)
        return True
    work = dist.irecv(torch.zeros(1), 0)
    assert work is not None
    work.wait()
    print("first wait: done", flush=True)
    try:
        work.wait(timedelta(seconds=2))
    except RuntimeError as error:
        if "Timed out" not in str(error):
            raise
        print(f"second wait: {str(error)[:80]}", flush=True)
        return False
    print("second wait: done", flush=True)
    return True


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as directory:
        other = get_context("fork").Process(target=wait_twice, args=(0, f"{directory}/store"), daemon=True)
        other.start()
        ended = wait_twice(1, f"{directory}/store")
        other.join()
    sys.exit(not ended)

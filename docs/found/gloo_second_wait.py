"""gloo: a second wait() for a receive never ends, where a second wait() for any collective returns at once.

Seen on torch 2.13.0 and 2.15.0. Found by test/distributed/test_c10d_properties.py, which shrank it to the program
[send_recv(1)]. Run it by itself: it prints what each wait did.
"""

import os
import tempfile
from datetime import timedelta

import torch
import torch.distributed as dist


def rank(number: int, file: str) -> None:
    store = dist.FileStore(file, 2)
    dist.init_process_group("gloo", store=store, rank=number, world_size=2, timeout=timedelta(seconds=20))
    if number == 0:
        dist.send(torch.ones(1), 1)
        return
    work = dist.irecv(torch.zeros(1), 0)
    work.wait()
    print("first wait: done", flush=True)
    try:
        work.wait(timedelta(seconds=2))
        print("second wait: done", flush=True)
    except RuntimeError as error:
        print(f"second wait: {str(error)[:80]}", flush=True)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as directory:
        if os.fork() == 0:
            rank(0, f"{directory}/store")
            os._exit(0)
        rank(1, f"{directory}/store")
        os.wait()

"""How long a test takes whose ranks use a GPU: fresh ranks and persistent ones."""

import statistics
import time

from runs import run_test

ORDER = 100
LIMIT = 20


def check(c):
    found = run_test(c, "test_launch.py", "--gpus=1")
    c.expect(found.code == 0, "all of these tests pass", found.failures)
    c.expect(not found.idle_leases(), "those that lease the GPU have memory of it", found.idle_leases())
    for kind in ("fresh", "persistent"):
        seconds = [one["seconds"] for name, one in found.tests.items() if name.startswith(f"test_{kind}")]
        if seconds:
            c.figure(f"{kind}: first test", seconds[0], "s")
            c.figure(f"{kind}: median of the others", statistics.median(seconds[1:] or seconds), "s")
    began = time.monotonic()
    import torch

    c.figure("import torch", time.monotonic() - began, "s")
    began = time.monotonic()
    torch.ones(1, device="cuda").item()
    c.figure("the first use of CUDA in a process", time.monotonic() - began, "s")


def on_cpu(c):
    found = run_test(c, "test_launch.py", "-k", "cpu")
    c.expect(found.code == 0 and found.outcomes, "its tests for the CPU pass", found.failures or found.text[-300:])

"""Four ranks share a GPU over NCCL itself, which allows that from version 2.30 on."""

from runs import run_test

ORDER = 32
LIMIT = 20


def check(c):
    import torch

    version = tuple(torch.cuda.nccl.version())
    if version < (2, 30):
        c.skip(f"NCCL {'.'.join(map(str, version))} does not let ranks share a GPU")
    if torch.cuda.device_count() > 3:
        c.skip("there is a GPU for each rank")
    found = run_test(c, "test_shared.py", "--ranks-per-gpu=4", "--timeout=20")
    c.expect(found.code == 0, "each base passes", found.failures or found.code)
    backends = {(one["attempts"][-1]["sharing"] or {}).get("backend") for one in found.tests.values()}
    c.expect(backends == {"nccl"}, "over NCCL", backends)
    c.expect(not found.idle_leases(), "each test has memory of the GPU", found.idle_leases())
    for name, one in found.tests.items():
        c.figure(f"{name}: device memory", (one["attempts"][-1].get("device_memory") or {}).get("reserved"), "bytes")

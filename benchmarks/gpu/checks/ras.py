"""A hang under NCCL shows NCCL's own status (RAS), from an address that no other job has."""

from runs import run_test

ORDER = 47
LIMIT = 50


def check(c):
    import torch

    version = tuple(torch.cuda.nccl.version())
    if version < (2, 24):
        c.skip(f"NCCL {version} has no RAS")
    found = run_test(c, "test_hang.py", "-k", "behind_a_kernel")
    message = found.message("test_nccl_behind_a_kernel")
    c.expect("NCCL's own status (RAS)" in message, "the message of a hang has NCCL's own status", message[:1500])
    c.note(message[message.find("NCCL's own status") :][:1500])

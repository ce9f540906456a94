"""A hang on a GPU is explained: where the rank is, and the last collectives that the backend's recorder has."""

from runs import run_test

ORDER = 44
LIMIT = 25


def check(c):
    found = run_test(c, "test_hang.py", "-k", "behind_a_kernel")
    behind = found.message("test_nccl_behind_a_kernel")
    got = found.outcomes.get("test_nccl_behind_a_kernel")
    c.expect(got == "timeout", "a hang under NCCL times out", f"{got}: {behind[:600]}")
    c.expect("synchronize" in behind, "its explanation shows where the rank is", behind[:1500])
    c.expect("all_reduce" in behind, "its explanation shows NCCL's last collective", behind[:1500])
    import torch

    if tuple(torch.cuda.nccl.version()) >= (2, 28, 9):
        c.expect("NCCL's own status (RAS)" in behind, "it has NCCL's own status of the ranks", behind[:1500])
    c.note(f"one rank behind a kernel: {behind[:1500]}")

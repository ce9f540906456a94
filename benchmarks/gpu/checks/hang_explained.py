"""Hangs on a GPU are explained: where each rank is, and the last collectives that the backend's recorder has."""

from runs import run_test

ORDER = 44
LIMIT = 35


def check(c):
    found = run_test(c, "test_hang.py", "--ranks-per-gpu=2")
    behind, alone = found.message("test_nccl_behind_a_kernel"), found.message("test_one_does_not_come")
    outcomes = found.outcomes
    c.expect(outcomes.get("test_nccl_behind_a_kernel") == "timeout", "a hang under NCCL times out", behind[:600])
    c.expect("synchronize" in behind, "its explanation shows where the rank is", behind[:1500])
    c.expect("all_reduce" in behind, "its explanation shows NCCL's last collective", behind[:1500])
    c.expect(
        outcomes.get("test_one_does_not_come") in ("timeout", "error", "failed"),
        "a rank that does not come to a collective makes the test fail",
        f"{outcomes.get('test_one_does_not_come')}: {alone[:600]}",
    )
    c.expect("do_not_come" in alone, "its explanation shows where that rank is", alone[:1500])
    c.expect("all_reduce" in alone, "its explanation shows what the other rank waits for", alone[:1500])
    import torch

    if tuple(torch.cuda.nccl.version()) >= (2, 28, 9):
        c.expect("NCCL's own status (RAS)" in behind, "it has NCCL's own status of the ranks", behind[:1500])
    c.note(f"one rank behind a kernel: {behind[:1500]}")
    c.note(f"one of two ranks does not come: {alone[:1500]}")

"""A rank is killed by SIGKILL inside a collective of NCCL: the time until the verdict, and the memory after it."""

from runs import run_with_memory

ORDER = 51
LIMIT = 25


def check(c):
    import torch

    found = run_with_memory(c, "test_kill.py", "--timeout=60")
    names = ["test_alone", *(["test_with_a_peer"] if torch.cuda.device_count() > 1 else [])]
    for name in names:
        message, got = found.message(name), found.outcomes.get(name)
        c.expect(got == "crashed" and "SIGKILL" in message, f"{name}: the rank was killed", f"{got}: {message[:600]}")
        c.expect("rank" in message.partition("\n")[0], f"{name}: the title names the rank", message[:300])
        # The rank has lived for a second after its collective began.
        c.figure(f"{name}: seconds of the test", found.tests.get(name, {}).get("seconds"), "s")

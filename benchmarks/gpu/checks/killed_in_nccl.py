"""A rank is killed by SIGKILL inside a collective of NCCL: the time until the verdict, and the memory after it."""

from runs import run_test, run_with_memory

ORDER = 51
LIMIT = 25
# Seconds from the kill to the verdict: the grace period of the peer, its end, and the return of the memory.
MOST = 20.0


def check(c):
    meeting = meeting_of(c)
    found = run_with_memory(c, "test_kill.py", "--timeout=60", "--ranks-per-gpu=2", environ=meeting)
    for name in ("test_alone", "test_with_a_peer"):
        judge(c, found, name)
    c.note(f"the two ranks: over {sorted(found.backends()) or 'NCCL, on two GPUs'}")


def meeting_of(c):
    return {"GPU_CHECK_MEETING": str(c.folder)}


def judge(c, found, name):
    message, got = found.message(name), found.outcomes.get(name)
    rank = 1 if name == "test_with_a_peer" else 0
    c.expect(got == "crashed" and "SIGKILL" in message, f"{name}: the rank was killed", f"{got}: {message[:600]}")
    c.expect(f"rank {rank}" in found.title(name), f"{name}: the title names rank {rank}", message[:300])
    note = c.folder / name
    if c.expect(note.exists(), f"{name}: the rank came to its end in the collective", message[:600]):
        seconds = found.ended(name) - float(note.read_text())
        c.figure(f"{name}: from the kill to the end of the test", seconds, "s")
        c.expect(seconds < MOST, f"{name}: the verdict comes within {MOST:g} s of the kill", seconds)


def on_cpu(c):
    judge(c, run_test(c, "test_kill.py", "-k", "with_a_peer", environ=meeting_of(c)), "test_with_a_peer")

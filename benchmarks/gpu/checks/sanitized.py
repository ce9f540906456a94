"""Ranks with tensors on a GPU that disagree, or whose models part, are told."""

from runs import run_test

ORDER = 49
LIMIT = 25

SAID = {
    "test_counts_of_a_gather": "call #1 of the default group",
    "test_other_operation": "float32 max",
    "test_a_bit_of_a_parameter": "diverged from rank 1 between steps 2 and 3: bias [4]",
}


def check(c):
    found = run_test(c, "test_sanitize.py", "--ranks-per-gpu=2")
    for name, said in SAID.items():
        got, message = found.outcomes.get(name), found.message(name)
        c.expect(got in ("failed", "error", "timeout", "crashed"), f"{name} fails", f"{got}: {message[:600]}")
        c.expect(said in message, f"{name}: the message says {said!r}", message[:1500])
        c.note(f"{name}: {message[:600]}")


def on_cpu(c):
    check(c)

"""Properties on GPUs: all ranks draw the same examples, and a rank that fails wakes the others from a collective."""

from runs import run_test

ORDER = 40
LIMIT = 20


def check(c):
    found = run_test(c, "test_properties.py", "--ranks-per-gpu=2", "--timeout=45")
    outcomes = found.outcomes
    c.expect(outcomes.get("test_sum") == "passed", "a property of all-reduce holds", found.message("test_sum")[:600])
    message = found.message("test_one_rank_fails")
    c.expect(outcomes.get("test_one_rank_fails") == "failed", "a property that fails in one rank fails", message[:600])
    c.expect("large" in message, "its failure is the one of that rank", message[:600])
    seconds = found.tests.get("test_one_rank_fails", {}).get("seconds", 1000.0)
    c.figure("time until a property has failed whose other rank waits", seconds, "s")
    c.expect(seconds < 40, "the other rank is woken: the test does not time out", seconds)
    c.expect(not found.idle_leases(), "the property that holds has memory of the GPUs", found.idle_leases())
    sharing = [one["attempts"][-1]["sharing"] for one in found.tests.values()]
    c.note(f"backend of ranks that share: {sorted({one['backend'] for one in sharing if one}) or 'none share'}")


def on_cpu(c):
    check(c)

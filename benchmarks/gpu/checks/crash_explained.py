"""A rank is killed, crashes, runs out of memory or trips an assertion of a kernel: the report says which and how."""

from runs import run_test

ORDER = 45
LIMIT = 30

EXPECTED = {
    "test_killed": ("crashed", "SIGKILL"),
    "test_segmentation_fault": ("crashed", "SIGSEGV"),
    "test_out_of_memory": ("error", "out of memory"),
    "test_device_assert": ("error", "device-side assert"),
}


def check(c):
    found = run_test(c, "test_crash.py", "--timeout=40")
    c.expect(found.code == 1, "the run fails", found.code)
    for name, (outcome, word) in EXPECTED.items():
        got, message = found.outcomes.get(name, "no result"), found.message(name)
        c.expect(got == outcome, f"{name} counts as {outcome}", f"{got}: {message[:300]}")
        c.expect(word.lower() in message.lower(), f"the message of {name} says {word!r}", message[:500])
        c.expect("rank" in message, f"the message of {name} names the rank", message[:300])
    c.expect(found.outcomes.get("test_after") == "passed", "the next test on the GPU passes", found.outcomes)
    leaked = [name for name, got in found.outcomes.items() if got == "leaked"]
    c.expect(not leaked, "the GPU has its memory back after each of them", leaked)

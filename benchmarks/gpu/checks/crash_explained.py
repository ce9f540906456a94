"""A rank is killed, crashes, runs out of memory or trips an assertion of a kernel: the report says which and how."""

from runs import run_test

ORDER = 45
LIMIT = 35

# By test: the outcome, a word of the message, and the rank that the title names.
EXPECTED = {
    "test_killed": ("crashed", "SIGKILL", 0),
    "test_segmentation_fault": ("crashed", "SIGSEGV", 0),
    "test_out_of_memory": ("error", "out of memory", 0),
    "test_device_assert": ("error", "device-side assert", 0),
    "test_device_assert_of_rank_1": ("error", "device-side assert", 1),
    "test_persistent_device_assert": ("error", "device-side assert", 0),
}


def check(c):
    # One after the other, on the same GPU.
    found = run_test(c, "test_crash.py", "--timeout=40", "--gpus=1", "--ranks-per-gpu=2")
    c.expect(found.code == 1, "the run fails", found.code)
    for name, (outcome, word, rank) in EXPECTED.items():
        got, message = found.outcomes.get(name, "no result"), found.message(name)
        c.expect(got == outcome, f"{name} counts as {outcome}", f"{got}: {message[:300]}")
        c.expect(word.lower() in message.lower(), f"the message of {name} says {word!r}", message[:500])
        c.expect(f"rank {rank}" in found.title(name), f"the title of {name} names rank {rank}", message[:300])
        c.note(f"{name}: {found.title(name)}")
    for name in ("test_zz_after", "test_persistent_later"):
        got = found.outcomes.get(name)
        c.expect(got == "passed", f"{name}, the next test, passes", f"{got}: {found.message(name)[:600]}")
        # By then, those before it have ended: else it shows nothing.
        before = "test_persistent_device_assert" if name == "test_persistent_later" else "test_device_assert"
        if {name, before} <= set(found.tests):
            c.expect(found.began(name) > found.began(before), f"{name} runs after {before}")
    leaked = [name for name, got in found.outcomes.items() if got == "leaked"]
    c.expect(not leaked, "the GPU has its memory back after each of them", leaked)

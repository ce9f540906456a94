"""After 300 tests in the same ranks, neither they nor the GPU have more memory in use than after the first ones."""

from runs import run_with_memory

ORDER = 52
LIMIT = 25
TESTS = 300
# Passes if the others had the same rank.
LAST = "test_zz_in_one_rank"


def check(c):
    found = run_with_memory(c, "test_many.py", "--gpus=1")
    passed = {name for name, outcome in found.outcomes.items() if outcome == "passed"}
    c.expect(LAST in passed, f"all {TESTS} tests have the same rank", found.message(LAST)[:600])
    c.expect(len(passed - {LAST}) == TESTS, f"{TESTS} tests pass, each with the memory of the first", found.failures)
    on_gpu = [one for one in found.on_gpu() if not one.endswith(LAST)]
    c.expect(len(on_gpu) == TESTS, "each has memory of the GPU", len(on_gpu))
    c.figure(f"{TESTS} tests", found.document.get("seconds"), "s")

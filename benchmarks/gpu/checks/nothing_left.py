"""After 300 tests in the same ranks, neither they nor the GPU have more memory in use than after the first ones."""

from runs import run_with_memory

ORDER = 52
LIMIT = 25
TESTS = 300


def check(c):
    found = run_with_memory(c, "test_many.py", "--gpus=1")
    c.expect(
        found.count("passed") == TESTS, f"all {TESTS} tests pass, each with the memory of the first", found.failures
    )
    c.expect(len(found.on_gpu()) == TESTS, "each has memory of the GPU", len(found.on_gpu()))
    c.figure(f"{TESTS} tests", found.document.get("seconds"), "s")

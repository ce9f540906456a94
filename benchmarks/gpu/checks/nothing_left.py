"""After 300 tests in the same ranks, neither they nor the GPU have more memory in use than after the first ones."""

from contextlib import closing

from runs import run_test

ORDER = 52
LIMIT = 25
TESTS = 300


def check(c):
    from torch_testing_ext._machine.nvml import NvmlError, open_nvml
    from torch_testing_ext.runner.engine.engine import MARGIN

    try:
        nvml = open_nvml()
    except NvmlError as error:
        c.skip(f"memory cannot be checked: {error}")
    with closing(nvml):
        before = _used(nvml)
        found = run_test(c, "test_many.py", "--gpus=1")
        after = _used(nvml)
    c.expect(
        found.count("passed") == TESTS, f"all {TESTS} tests pass, each with the memory of the first", found.failures
    )
    c.expect(len(found.on_gpu()) == TESTS, "each has memory of the GPU", len(found.on_gpu()))
    c.figure(f"{TESTS} tests", found.document.get("seconds"), "s")
    c.expect(after <= before + MARGIN, "the GPU has its memory back after the run", after - before)


def _used(nvml):
    return sum(one.memory or 0 for one in nvml.usage().values())

"""Every base runs one rank on a GPU, under the GPU's own backend."""

from runs import run_test

ORDER = 20
LIMIT = 25


def check(c):
    bases = run_test(c, "test_one_rank.py", "-otests=benchmarks/gpu/project", name="bases")
    c.expect(bases.code == 0 and bases.outcomes, "each base passes with one rank", bases.failures or bases.code)
    c.expect(
        all(outcome == "passed" for outcome in bases.outcomes.values()), "none of these tests skips", bases.outcomes
    )
    for name, one in bases.tests.items():
        c.figure(f"{name}", one["seconds"], "s")
    with_memory = [name for name, one in bases.tests.items() if one["attempts"][-1].get("device_memory")]
    c.expect(with_memory, "reports say the most device memory of a test", list(bases.tests))
    c.expect(not bases.idle_leases(), "each of them has memory of the GPU", bases.idle_leases())


def on_cpu(c):
    bases = run_test(c, "test_one_rank.py")
    c.expect(bases.code == 0 and bases.outcomes, "each base passes with one rank", bases.failures or bases.code)

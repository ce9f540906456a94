"""Every base runs one rank on a GPU under the GPU's own backend, and the suites pass or skip on the GPUs there are."""

from runs import run_test

ORDER = 20
LIMIT = 100
QUICK_LIMIT = 60


def check(c):
    bases = run_test(c, "test_one_rank.py", "--tests", "benchmarks/gpu/project", name="bases")
    c.expect(bases.code == 0 and bases.outcomes, "each base passes with one rank", bases.failures or bases.code)
    c.expect(
        all(outcome == "passed" for outcome in bases.outcomes.values()), "none of these tests skips", bases.outcomes
    )
    for name, one in bases.tests.items():
        c.figure(f"{name}", one["seconds"], "s")
    with_memory = [name for name, one in bases.tests.items() if one["attempts"][-1].get("device_memory")]
    c.expect(with_memory, "reports say the most device memory of a test", list(bases.tests))
    if not c.quick:
        suites = run_test(c, *SUITES, "--tests", "test/distributed", "--allow-all-skipped", name="suites")
        c.expect(suites.code == 0, "the five suites pass or skip without sharing devices", suites.failures)
        c.figure("suites without sharing: passed", suites.count("passed"))
        c.figure("suites without sharing: skipped", suites.count("skipped"))
        c.figure("suites without sharing", suites.document.get("seconds"), "s")


def on_cpu(c):
    bases = run_test(c, "test_one_rank.py")
    c.expect(bases.code == 0 and bases.outcomes, "each base passes with one rank", bases.failures or bases.code)


SUITES = (
    "test/distributed/fsdp/test_fully_shard_tp_integration.py",
    "test/distributed/fsdp/test_fsdp_tp_integration.py",
    "test/distributed/tensor/parallel/test_ddp_2d_parallel.py",
    "test/distributed/tensor/parallel/test_tp_examples.py",
    "test/distributed/_composable/test_replicate_with_compiler.py",
)

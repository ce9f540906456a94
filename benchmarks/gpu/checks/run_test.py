"""run_test.py over all suites: every test passes, or skips with a reason."""

import runs
from suites import SUITES

ORDER = 90
LIMIT = 150
QUICK_LIMIT = 80


def check(c):
    names = ["test/distributed/fsdp", "test/distributed/tensor/parallel/test_ddp_2d_parallel.py"] if c.quick else []
    # The five suites have a check of their own.
    others = [] if c.quick else ["-x", *SUITES]
    options = ("-otests=test/distributed", "--ranks-per-gpu=4", "--timeout=100")
    found = runs.run_test(c, *names, *options, *others)
    for verdict in ("passed", "failed", "skipped"):
        c.figure(verdict, found.count(verdict))
    c.figure("time", found.document.get("seconds"), "s")
    on_gpu = [one for one in found.tests.values() if one["attempts"][-1]["devices"]]
    c.figure("tests on GPUs", len(on_gpu))
    c.expect(found.code == 0, "run_test.py exits with 0", found.code)
    c.expect(not found.failures, "no test fails", found.failures[:10])
    c.expect(on_gpu, "tests run on GPUs")
    for text in found.document.get("warnings", []):
        c.note(f"warning: {text}")


def on_cpu(c):
    found = runs.run_test(c, "test/distributed/tensor/parallel/test_ddp_2d_parallel.py", "-otests=test/distributed")
    c.expect(found.code == 0, "a suite passes on the CPU", found.failures)

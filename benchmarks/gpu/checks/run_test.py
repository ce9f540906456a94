"""run_test.py runs tests on the CPU beside tests on GPUs, and only these lease one."""

import runs

ORDER = 90
LIMIT = 30


def check(c):
    files = (
        "test/distributed/_spmd/test_data_parallel.py",
        "test/distributed/properties/test_checkpoint_properties.py",
    )
    found = runs.run_test(c, *files, "-otests=test/distributed", "--ranks-per-gpu=4", "--timeout=60")
    for verdict in ("passed", "failed", "skipped"):
        c.figure(verdict, found.count(verdict))
    c.figure("time", found.document.get("seconds"), "s")
    on_gpu, idle = found.on_gpu(), found.idle_leases()
    c.figure("tests with memory of a GPU", len(on_gpu))
    c.expect(found.code == 0, "run_test.py exits with 0", found.code)
    c.expect(not found.failures, "no test fails", found.failures[:10])
    wanted = [one["id"] for one in found.document.get("tests", []) if "test_data_parallel" in one["id"]]
    c.expect(wanted and sorted(on_gpu) == sorted(wanted), "the tests of the SPMD compiler have memory of a GPU", on_gpu)
    c.expect(not idle, "no other test leases a GPU", idle)
    for text in found.document.get("warnings", []):
        c.note(f"warning: {text}")


def on_cpu(c):
    found = runs.run_test(c, "test/distributed/tensor/parallel/test_ddp_2d_parallel.py", "-otests=test/distributed")
    c.expect(found.code == 0, "a suite passes on the CPU", found.failures)

"""Tests that need 4 GPUs pass in 4 ranks on fewer, over NCCL where its version allows that, else over gloo."""

from runs import run_test
from suites import SUITES

ORDER = 30
LIMIT = 95
QUICK_LIMIT = 90


def check(c):
    import torch

    devices = torch.cuda.device_count()
    share = "--ranks-per-gpu=4"
    own = run_test(c, "test_shared.py", share, name="own")
    c.expect(own.code == 0, "each base passes with 4 ranks on shared GPUs", own.failures or own.code)
    if devices < 4:
        over = {
            one["attempts"][-1]["sharing"]["backend"] for one in own.tests.values() if one["attempts"][-1]["sharing"]
        }
        c.expect(
            over and over <= {"gloo", "nccl"}, "reports say that the ranks share GPUs, and over which backend", over
        )
        c.figure("backend of ranks that share", ", ".join(sorted(over)))
    for suite in SUITES[:1] if c.quick else SUITES:
        name = suite.rpartition("/")[2].removesuffix(".py")
        found = run_test(c, suite, share, "-otests=test/distributed", "--timeout=60", name=name)
        on_gpu, idle = found.on_gpu(), found.idle_leases()
        c.figure(f"{name}: passed", found.count("passed"))
        c.figure(f"{name}: skipped", found.count("skipped"))
        c.figure(f"{name}: on GPUs", len(on_gpu))
        c.note(f"{name}: ranks that share GPUs use {sorted(found.backends()) or 'no backend: none share'}")
        c.figure(f"{name}: time", found.document.get("seconds"), "s")
        c.expect(found.code == 0, f"{name} passes with 4 ranks on {devices} GPU(s)", found.failures or found.code)
        c.expect(on_gpu, f"tests of {name} have memory of GPUs", found.outcomes)
        c.expect(not idle, f"no test of {name} leases a GPU without using it", idle)
    wrong = run_test(c, "test_shared.py", "--ranks-per-gpu=100000", name="wrong")
    c.expect(
        wrong.code == 4 and "before it has a tensor" in wrong.text,
        "more ranks than the memory allows are refused before anything starts",
        wrong.text[-300:],
    )


def on_cpu(c):
    if not c.quick:
        planned = run_test(c, "test_shared.py", "--ranks-per-gpu=4", "--fake-accelerators=1", "--dry-run")
        c.expect(run_test(c, "test_shared.py", name="own").code == 0, "each base passes with 4 ranks")
        c.expect("devices 0" in planned.text, "four ranks are planned on one device", planned.text[-300:])
    wrong = run_test(c, "test_shared.py", "--ranks-per-gpu=0", name="wrong")
    c.expect(wrong.code == 4 and "Traceback" not in wrong.text, "--ranks-per-gpu 0 is refused in one line", wrong.text)

"""Needs of devices are read before a test starts: what cannot be met is skipped for that reason."""

from runs import run_test

ORDER = 60
LIMIT = 15


def check(c):
    import torch

    found = run_test(c, "test_needs.py")
    outcomes = found.outcomes
    c.expect(found.code == 0, "nothing fails", found.failures)
    for name in ("test_small", "test_old"):
        c.expect(outcomes.get(name) == "passed", f"{name} runs", outcomes.get(name))
    for name, why in (("test_huge", "of memory"), ("test_future", "compute capability 99.0")):
        message = found.message(name)
        c.expect(outcomes.get(name) == "skipped" and why in message, f"{name} is skipped for that reason", message)
        c.note(f"{name}: {message}")
    devices = torch.cuda.device_count()
    for name in ("test_peers", "test_nvlink"):
        c.note(f"{name} with {devices} device(s): {outcomes.get(name)}: {found.message(name)}")
        c.expect(outcomes.get(name) in ("passed", "skipped"), f"{name} passes or is skipped", outcomes.get(name))


def on_cpu(c):
    found = run_test(c, "test_needs.py", "-oallow-all-skipped=true")
    c.expect(set(found.outcomes.values()) == {"skipped"}, "everything is skipped without a GPU", found.outcomes)
    c.expect(found.code == 0, "that is no failure", found.text[-300:])

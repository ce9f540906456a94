"""A rank is killed by SIGKILL inside a collective of NCCL: the time until the verdict, and the memory after it."""

from contextlib import closing

from runs import run_test

ORDER = 51
LIMIT = 25


def check(c):
    import torch

    from torch_testing_ext._machine.nvml import NvmlError, open_nvml
    from torch_testing_ext.runner.engine.engine import MARGIN

    try:
        nvml = open_nvml()
    except NvmlError as error:
        c.skip(f"memory cannot be checked: {error}")
    with closing(nvml):
        before = _used(nvml)
        found = run_test(c, "test_kill.py", "--timeout=60")
        after = _used(nvml)
    names = ["test_alone", *(["test_with_a_peer"] if torch.cuda.device_count() > 1 else [])]
    for name in names:
        message, got = found.message(name), found.outcomes.get(name)
        c.expect(got == "crashed" and "SIGKILL" in message, f"{name}: the rank was killed", f"{got}: {message[:600]}")
        c.expect("rank" in message.partition("\n")[0], f"{name}: the title names the rank", message[:300])
        # The rank has lived for a second after its collective began.
        c.figure(f"{name}: seconds of the test", found.tests.get(name, {}).get("seconds"), "s")
    c.expect(after <= before + MARGIN, "the GPUs have their memory back after the run", after - before)


def _used(nvml):
    return sum(one.memory or 0 for one in nvml.usage().values())

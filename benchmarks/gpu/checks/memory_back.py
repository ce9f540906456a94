"""A lease ends when the memory is back: how long that takes after SIGKILL, and what happens if it does not."""

import os
import signal
import statistics
import subprocess
import sys
import time

from runs import finish, start_run_test

ORDER = 50
LIMIT = 30

HOLDER = """
import sys, torch
kept = torch.ones(int(sys.argv[1]) * 2**20, dtype=torch.uint8, device="cuda")
torch.cuda.synchronize()
print("ready", flush=True)
sys.stdin.read()
"""
WAITING_HOLDER = """
import os, sys, time
import torch
folder = sys.argv[1]
while not os.path.exists(f"{folder}/test_runs"):
    time.sleep(0.02)
kept = torch.ones(2**30, dtype=torch.uint8, device="cuda")
torch.cuda.synchronize()
open(f"{folder}/memory_is_held", "w").close()
sys.stdin.read()
"""


def check(c):
    from torch_testing_ext._machine.nvml import open_nvml
    from torch_testing_ext._process.questions import NoAnswer

    try:
        nvml = open_nvml()
    except NoAnswer as error:
        c.skip(f"memory cannot be checked: {error}")
    try:
        _time_after_kill(c, nvml)
    finally:
        nvml.close()
    _quarantine(c)


def _time_after_kill(c, nvml):
    from torch_testing_ext.runner.engine.memory_return import MEMORY_MARGIN

    after_kill, after_exit = [], []
    for megabytes in (512, 8192) if c.quick else (512, 512, 8192, 8192, 8192):
        before = _used(nvml)
        holder = subprocess.Popen(
            [sys.executable, "-c", HOLDER, str(megabytes)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        holder.stdout.readline()
        during = _used(nvml)
        c.expect(during > before + megabytes * 2**20, f"NVML sees {megabytes} MiB in use", during - before)
        killed = time.monotonic()
        os.kill(holder.pid, signal.SIGKILL)
        holder.wait()
        ended = time.monotonic()
        while _used(nvml) > before + MEMORY_MARGIN and time.monotonic() < killed + 10:
            time.sleep(0.002)
        back = time.monotonic()
        c.expect(
            _used(nvml) <= before + MEMORY_MARGIN,
            f"{megabytes} MiB come back within 10 s of SIGKILL",
            _used(nvml) - before,
        )
        c.figure(f"{megabytes} MiB: from SIGKILL to the baseline", back - killed, "s")
        c.figure(f"{megabytes} MiB: from the process's end to the baseline", back - ended, "s")
        after_kill.append(back - killed)
        after_exit.append(back - ended)
        holder.stdin.close()
        holder.stdout.close()
    c.figure("median from SIGKILL to the baseline", statistics.median(after_kill), "s")
    c.figure("median from the process's end to the baseline", statistics.median(after_exit), "s")


def _used(nvml):
    return sum(one.memory or 0 for one in nvml.usage().values())


def _quarantine(c):
    """A process outside of the run takes memory while a test runs, and keeps it."""
    from torch_testing_ext._process import system

    meeting = c.folder / "meeting"
    meeting.mkdir()
    holder = subprocess.Popen([sys.executable, "-c", WAITING_HOLDER, str(meeting)], stdin=subprocess.PIPE)
    try:
        run = start_run_test(c, "test_memory.py", "--gpus=1", environ={"GPU_CHECK_MEETING": str(meeting)})
        found = finish(c, run)
    finally:
        holder.stdin.close()
        holder.wait()
    message = found.message("test_meets_a_holder")
    if system.has_pids_of_host():
        outcomes = {"test_meets_a_holder": "passed", "test_z_later": "passed"}
        c.expect(found.outcomes == outcomes, "what a process of others takes fails no test", found.failures)
        c.expect("other programs have taken" in found.text, "a warning names that process", found.text[-600:])
        return
    # In a container, the process may be one of the test.
    c.expect(
        found.outcomes.get("test_meets_a_holder") == "leaked",
        "the test that the memory is missing after leaked",
        message,
    )
    c.expect("it is not used again in this run" in message, "the report says that the GPU is not used again", message)
    if f"pid {holder.pid}" in message:
        c.note("the process that holds the memory is named by its pid")
    else:
        c.note(f"pid {holder.pid} holds the memory, and NVML's name for it is another: {message[:300]}")
    later = found.message("test_z_later")
    c.expect("too few devices are left" in later, "the next test says why it cannot run", later[:300])

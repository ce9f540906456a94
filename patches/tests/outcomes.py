"""Runs a test class of torch's own kit in a forked process, which forks its ranks, and tells how its test ended.

These tests are about how a base judges its ranks, not about how they start: forks spare them many imports of torch.
"""

import multiprocessing
import os
import signal
import sys
import textwrap
import unittest
from tempfile import TemporaryFile
from typing import Any

os.environ["CUDA_VISIBLE_DEVICES"] = ""  # before torch is imported

import torch
from torch.testing._internal.common_distributed import TEST_SKIPS, MultiProcessTestCase

ENDS = ("passed", "failed", "skipped")

# A test on two ranks; `outcome_of_ranks` gives its body.
RANKS = """
class Subject(MultiProcessTestCase):
    world_size = 2

    def setUp(self):
        super().setUp()
        self._spawn_processes()

    def test_it(self):
        skip = TEST_SKIPS["generic"].exit_code
        {body}
"""


def outcome_of_ranks(body: str, also: str = "") -> tuple[str, str]:
    """The outcome of a test that each of two ranks runs. `also`: more members of its class."""
    return outcome(RANKS.format(body=body) + also)


def outcome(body: str) -> tuple[str, str]:
    """("passed" | "failed" | "skipped", its output) of the one test of the class Subject in this body."""
    with TemporaryFile("w+", errors="replace") as output:
        pid = os.fork()
        if pid == 0:
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
            code = len(ENDS)
            try:
                code = ENDS.index(_run(textwrap.dedent(body)))
            finally:
                os._exit(code)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        output.seek(0)
        text = output.read()
    if code not in range(len(ENDS)):
        raise RuntimeError(f"the class did not run one test:\n{text}")
    return ENDS[code], text


def _run(body: str) -> str:
    multiprocessing.set_start_method("fork")  # the kit asks for "spawn", unless a method is set
    MultiProcessTestCase._spawn_processes = _fork_processes
    names: dict[str, Any] = {"os": os, "signal": signal, "sys": sys, "unittest": unittest, "torch": torch}
    names |= {"MultiProcessTestCase": MultiProcessTestCase, "TEST_SKIPS": TEST_SKIPS, "__name__": "subject"}
    exec(body, names)
    result = unittest.TextTestRunner().run(unittest.defaultTestLoader.loadTestsFromTestCase(names["Subject"]))
    sys.stderr.flush()
    if result.testsRun != 1:
        raise RuntimeError(f"{result.testsRun} tests ran")
    if not result.wasSuccessful():
        return "failed"
    return "skipped" if result.skipped else "passed"


def _fork_processes(case: Any) -> None:
    case._start_processes(multiprocessing.get_context("fork").Process)

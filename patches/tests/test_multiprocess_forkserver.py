"""MultiProcessTestCase: ranks are forked from a server that has imported torch and has not touched a device."""

import json
import os
import subprocess
import sys
import unittest
from pathlib import Path
from tempfile import TemporaryDirectory

# Each test passes if its ranks see what they must. `server` is the parent of a rank: a fork server, or the test itself.
SUBJECT = """
import json, os, sys, unittest
from pathlib import Path
import torch
import torch.distributed as dist
from torch.testing._internal.common_distributed import MultiProcessTestCase
from torch.testing._internal.common_utils import run_tests

class Ranks(MultiProcessTestCase):
    world_size = 2

    def setUp(self):
        super().setUp()
        if "environment" in self.id():  # the last test of its class: the server has started before
            os.environ["TORCH_DISTRIBUTED_DEBUG"] = "DETAIL"
            os.environ["SET_IN_SETUP"] = "yes"
            os.environ.pop("SET_BEFORE", None)
        os.environ["PID_OF_TEST"] = str(os.getpid())
        self._spawn_processes()

    def server(self):
        return Path("/proc", str(os.getppid()))

    def check_forked(self):
        self.assertNotEqual(str(os.getppid()), os.environ["PID_OF_TEST"])
        self.assertIn(b"forkserver", self.server().joinpath("cmdline").read_bytes())

class ForkedTest(Ranks):
    def test_forked_from_a_server_with_torch_and_without_a_device(self):
        self.check_forked()
        torch.cuda.is_available()
        maps = self.server().joinpath("maps").read_text()
        self.assertIn("libtorch_cpu", maps)
        opened = [os.readlink(file) for file in self.server().joinpath("fd").iterdir()]
        for device in ("/dev/nvidia", "/dev/kfd", "/dev/dri"):
            self.assertNotIn(device, " ".join([maps, *opened]))
        self.assertFalse(torch.cuda._is_in_bad_fork())

    def test_the_environment_is_that_of_the_test(self):
        self.check_forked()
        self.assertEqual(os.environ["SET_IN_SETUP"], "yes")
        self.assertNotIn("SET_BEFORE", os.environ)
        self.assertEqual(dist.get_debug_level(), dist.DebugLevel.DETAIL)
        dist.init_process_group("gloo", store=dist.FileStore(self.file_name, 2), rank=self.rank, world_size=2)
        tensor = torch.ones(1)
        dist.all_reduce(tensor)
        self.assertEqual(tensor.item(), 2)

    def test_rank_fails(self):
        self.check_forked()
        self.assertEqual(self.rank, 0, "as it should")

    def test_rank_is_killed(self):
        self.check_forked()
        os.kill(os.getpid(), 9)

    def test_skip(self):
        self.check_forked()
        raise unittest.SkipTest

class SpawnedTest(Ranks):
    start_method = "spawn"

    def test_parent_is_the_test(self):
        self.assertEqual(str(os.getppid()), os.environ["PID_OF_TEST"])

if __name__ == "__main__":
    first = "ForkedTest.test_forked_from_a_server_with_torch_and_without_a_device"
    if not unittest.main(argv=["", first], exit=False).result.wasSuccessful():
        sys.exit("the ranks are not as they should be; the other tests would take long")
    result = unittest.main(exit=False).result
    short = lambda test: test.id().partition(".")[2]
    broken = [(short(test), text) for test, text in result.failures + result.errors]
    skipped = [short(test) for test, _ in result.skipped]
    json.dump([result.testsRun, dict(broken), skipped], open(os.environ["RESULT"], "w"))
"""
# The modules of the server, the effect of the variable, and whether this torch has CUDA.
NAMES = """
from torch.testing._internal.common_distributed import FORKSERVER_PRELOAD, MultiProcessTestCase, torch
print(*FORKSERVER_PRELOAD, MultiProcessTestCase.start_method, torch.version.cuda)
"""


def run(words: list[str], **environment: str) -> str:
    ran = subprocess.run(
        [sys.executable, *words],
        env={**os.environ, "SET_BEFORE": "yes", **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=600,
        check=False,
    )
    if ran.returncode:
        raise RuntimeError(ran.stdout)
    return ran.stdout


class ForkServerTest(unittest.TestCase):
    def setUp(self) -> None:
        directory = TemporaryDirectory()
        self.addCleanup(directory.cleanup)
        self.folder = Path(directory.name)

    def test_ranks_are_forked_and_end_as_before(self) -> None:
        file, result = self.folder / "test_subject.py", self.folder / "result.json"
        file.write_text(SUBJECT)
        run([str(file)], RESULT=str(result))
        ran, broken, skipped = json.loads(result.read_text())
        self.assertEqual(ran, 6)
        self.assertEqual(set(broken), {"ForkedTest.test_rank_fails", "ForkedTest.test_rank_is_killed"}, broken)
        self.assertIn("as it should", broken["ForkedTest.test_rank_fails"])
        self.assertIn("-9", broken["ForkedTest.test_rank_is_killed"])
        self.assertEqual(skipped, ["ForkedTest.test_skip"])

    def test_server_asks_for_no_device(self) -> None:
        """glibc tells how often a process searches for a driver, also where there is none. `import torch` may do so."""
        *names, method, cuda = run(["-c", NAMES], PYTORCH_TEST_START_METHOD="spawn").splitlines()[-1].split()
        self.assertEqual(method, "spawn")
        imports = f"import importlib; [importlib.import_module(name) for name in {names}]"
        once = self.searches("import torch")
        self.assertEqual(self.searches(imports), once)
        if cuda != "None":
            self.assertGreater(self.searches("import torch; torch.cuda.is_available()"), once)

    def searches(self, code: str) -> int:
        run(["-c", code], LD_DEBUG="libs", LD_DEBUG_OUTPUT=str(self.folder / "searches"))
        files = list(self.folder.glob("searches.*"))
        text = "".join(file.read_text(errors="replace") for file in files)
        for file in files:
            file.unlink()
        self.assertIn("libtorch_cpu", text)
        return text.count("find library=libcuda.so")


if __name__ == "__main__":
    unittest.main()

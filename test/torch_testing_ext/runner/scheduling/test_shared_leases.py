"""Runs of one user on one machine share its devices: no two use one at once, and none waits for ever."""

import fcntl
import os
import signal
import stat
import tempfile
import unittest
from pathlib import Path

import pytest
from kit.jumping_loop import JumpingLoop
from kit.runs import RunsCase
from kit.with_accelerators import environ_of_accelerators

from torch_testing_ext._machine.device_locks import (
    LEASE_FOLDER,
    LEASED,
    DeviceLocks,
    default_folder,
    leased_by_ancestors,
)
from torch_testing_ext._process.private_folders import UnsafeFolder
from torch_testing_ext.runner.engine.other_runs import RESERVE_AFTER, OtherRuns
from torch_testing_ext.runner.options import Options
from torch_testing_ext.runner.scheduling.inventory import make_inventory
from torch_testing_ext.runner.scheduling.leases import Leases

FILE = "test/distributed/test_x.py"
# Each test says in a file that it holds its devices, which fails if another test does, in this run or another.
NEEDS_NONE = "import unittest\nclass T(unittest.TestCase):\n    def test_it(self): pass\n"
HOLDS = """
import os, unittest
from torch_testing_ext.common_distributed import skip_if_lt_x_gpu
from torch_testing_ext.common_utils import instantiate_parametrized_tests, parametrize
SHARED = {shared!r}
class T(unittest.TestCase):
    def hold(self):
        devices = os.environ["TESTACC_VISIBLE_DEVICES"].split(",")
        for device in devices:
            os.close(os.open(f"{{SHARED}}/held{{device}}", os.O_CREAT | os.O_EXCL))
        for device in devices:
            os.unlink(f"{{SHARED}}/held{{device}}")
    @parametrize("number", range({number}))
    @skip_if_lt_x_gpu({devices})
    def test_it(self, number): self.hold()
instantiate_parametrized_tests(T)
"""
WAITS = """
import os, time, unittest
from torch_testing_ext.common_distributed import skip_if_lt_x_gpu
class T(unittest.TestCase):
    @skip_if_lt_x_gpu(1)
    def test_it(self):
        open("fifo", "w").close()
        open("go").read()
"""
PASSES = """
import os, unittest
from torch_testing_ext.common_distributed import skip_if_lt_x_gpu
class T(unittest.TestCase):
    @skip_if_lt_x_gpu(1)
    def test_it(self): pass
"""
LEASES_AGAIN = """
import unittest
from torch_testing_ext._testing.bases.spawned_functions import need_of_devices
from torch_testing_ext.launch.device_leases import variables_of
from torch_testing_ext.common_distributed import skip_if_lt_x_gpu
class T(unittest.TestCase):
    @skip_if_lt_x_gpu(1)
    def test_it(self):
        with variables_of(need_of_devices(1, 1)): pass
"""


class LeasesCase(RunsCase):
    def setUp(self):
        super().setUp()
        self.locks = self.root / "locks"
        self.environ = environ_of_accelerators(1, TORCH_TESTING_EXT_RUN_LEASE_FOLDER=str(self.locks))

    def start(self, *argv, **more):
        return super().start(*argv, environ={**self.environ, **more.pop("environ", {})}, **more)

    def start_holding(self, *options, **more):
        """A run whose test has the only device, until something writes to the FIFO `go`."""
        self.write(FILE, WAITS)
        for fifo in "fifo", "go":
            os.mkfifo(self.root / fifo)
        run = self.start(*options, FILE, **more)
        self.wait_for_writer("fifo", run)
        return run

    def let_go(self):
        (self.root / "go").write_text("")

    def wait_until_said(self, run, words):
        said = ""
        for line in run.stdout:
            said += line
            if words in line:
                return said
        self.fail(said)


class ConcurrentRunsTest(LeasesCase):
    @pytest.mark.slow
    def test_many_runs_that_need_several_devices(self):
        runs = []
        for number, devices in enumerate((1, 2, 3, 2)):
            name = f"test/distributed/test_{number}.py"
            self.write(name, HOLDS.format(shared=str(self.root), number=4, devices=devices))
            runs.append(self.start("-j2", name, environ=environ_of_accelerators(3)))
        for run in runs:
            self.assertEqual(self.finish(run, 0).splitlines()[-1], "4 passed, 0 failed, 0 skipped")

    def test_waiting_is_shown_and_ends(self):
        first = self.start_holding()
        self.write("test/distributed/test_second.py", PASSES)
        second = self.start("test_second")
        said = self.wait_until_said(second, "waiting for")
        self.assertIn(f"waiting for 1 device, used by pid {first.pid}: ", said)
        self.assertIn(f"run_test.py {FILE}", said)
        self.let_go()
        self.finish(first, 0)
        self.finish(second, 0)

    @pytest.mark.slow
    def test_a_waiting_run_can_be_interrupted(self):
        first = self.start_holding()
        self.write("test/distributed/test_second.py", PASSES)
        second = self.start("test_second")
        self.wait_until_said(second, "waiting for")
        second.send_signal(signal.SIGTERM)
        self.assertIn("1 test did not finish", self.finish(second, 2))
        self.let_go()
        self.finish(first, 0)

    @pytest.mark.slow
    def test_tests_that_need_no_device_do_not_wait(self):
        first = self.start_holding()
        self.write("test/distributed/test_second.py", NEEDS_NONE)
        self.finish(self.start("test_second"), 0)
        self.let_go()
        self.finish(first, 0)

    @pytest.mark.slow
    def test_switched_off(self):
        """Then `spawn` in a test does not wait, either."""
        first = self.start_holding()
        self.write("test/distributed/test_second.py", LEASES_AGAIN)
        environ = {LEASE_FOLDER: str(self.locks)}
        self.finish(self.start("-oshared-leases=false", "test_second", environ=environ), 0)
        self.let_go()
        self.finish(first, 0)

    @pytest.mark.slow
    def test_a_run_inside_a_test_uses_the_devices_of_the_test(self):
        self.write("test/distributed/test_second.py", PASSES)
        self.write(
            FILE,
            """
            import os, subprocess, sys, unittest
            from torch_testing_ext.common_distributed import skip_if_lt_x_gpu
            class T(unittest.TestCase):
                @skip_if_lt_x_gpu(1)
                def test_it(self):
                    subprocess.run([sys.executable, "run_test.py", "test_second"], check=True)
            """.replace("\n            ", "\n"),
        )
        self.finish(self.start("--timeout=120", FILE), 0)

    @pytest.mark.slow
    def test_a_killed_run_frees_its_devices_when_nothing_uses_them(self):
        first = self.start_holding()
        first.kill()
        first.wait()
        self.write("test/distributed/test_second.py", PASSES)
        self.finish(self.start("test_second"), 0)

    def test_a_device_stays_locked_while_its_test_runs_although_run_test_is_gone(self):
        """The supervisor is stopped, so that it cannot end the test."""
        first = self.start_holding(cold=True)  # the supervisor descends from run_test.py
        path = self.locks / "testacc-testacc-0"
        owners = [pid for pid in _descendants(first.pid) if _has_open(pid, path)]
        self.assertEqual(len(owners), 1, "only the supervisor has the lock, besides run_test.py")
        os.kill(owners[0], signal.SIGSTOP)
        try:
            first.kill()
            first.wait()
            with path.open() as file, self.assertRaises(BlockingIOError):
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        finally:
            os.kill(owners[0], signal.SIGCONT)
        with path.open() as file:
            fcntl.flock(file, fcntl.LOCK_EX)  # waits until it is free

    def test_a_folder_that_cannot_be_used(self):
        self.write(FILE, PASSES)
        self.locks.touch()
        out = self.finish(self.start(), 0)
        self.assertIn("warning: other runs may use the same devices at the same time: ", out)


def _descendants(pid):
    children = [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return [*children, *(below for child in children for below in _descendants(child))]


def _has_open(pid, path):
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        try:
            if os.readlink(fd) == str(path):
                return True
        except OSError:
            continue
    return False


class DeviceLocksTest(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name, "locks")

    def locks(self, *identities, ancestors=()):
        made = DeviceLocks(self.folder, {f"n{one}": one for one in identities}, f"owner of {identities}", ancestors)
        self.addCleanup(made.close)
        return made

    def test_by_identity(self):
        one, other = self.locks("a", "b"), DeviceLocks(self.folder, {"x": "b"}, "other")
        self.addCleanup(other.close)
        self.assertTrue(one.acquire("nb"))
        self.assertFalse(other.acquire("x"))
        self.assertEqual(other.owner_of("x"), "owner of ('a', 'b')")
        one.release("nb")
        self.assertTrue(other.acquire("x"))
        self.assertFalse(one.acquire("nb"))
        self.assertTrue(one.acquire("na"))

    def test_a_descriptor_that_is_inherited_does_not_keep_the_lock(self):
        one, other = self.locks("a"), self.locks("a")
        one.acquire("na")
        inherited = os.dup(*one.descriptors(["na"]))
        self.addCleanup(os.close, inherited)
        one.release("na")
        self.assertTrue(other.acquire("na"))

    def test_ancestors(self):
        outer = self.locks("a", "b")
        outer.acquire("na")
        environ = outer.leased(["na"])
        self.assertEqual(environ, {LEASED: "a"})
        inner = self.locks("a", "b", ancestors=leased_by_ancestors(environ))
        self.assertTrue(inner.acquire("na"))
        outer.acquire("nb")
        self.assertFalse(inner.acquire("nb"))
        self.assertEqual(inner.leased(["nb"]), {LEASED: "a,b"})

    def test_a_reservation_does_not_concern_the_devices_of_ancestors(self):
        """A run inside a test would wait for the run that has the reservation, which waits for the test."""
        waits, inside = self.locks("a", "b"), self.locks("a", "b", ancestors=("a",))
        self.assertTrue(waits.reserve())
        self.assertEqual(inside.reserved_by_others(), {"nb"})
        leases = Leases(("na",), 1)
        with OtherRuns(inside, leases).choosing(wanted=True):
            self.assertEqual(leases.free_devices, 1)

    def test_stale_files_and_odd_names(self):
        for identity in "cuda-GPU-12/../34", "é" * 300, "MIG-GPU-aa/1/0", "..":
            one = self.locks(identity)
            self.assertTrue(one.acquire(f"n{identity}"))
            self.assertFalse(self.locks(identity).acquire(f"n{identity}"))
        one.close = lambda: None
        self.assertEqual({path.parent for path in self.folder.rglob("*")}, {self.folder})

    def test_a_deleted_file(self):
        one, other = self.locks("a"), self.locks("a")
        (self.folder / "a").unlink()
        self.assertTrue(one.acquire("na"))
        self.assertFalse(other.acquire("na"))

    def test_permissions(self):
        self.locks("a")
        self.assertEqual(stat.S_IMODE(self.folder.stat().st_mode), 0o700)
        self.folder.chmod(0o777)
        with self.assertRaisesRegex(UnsafeFolder, "can be written to by other users"):
            self.locks("a")
        elsewhere = self.folder.with_name("elsewhere")
        elsewhere.mkdir()
        link = self.folder.with_name("link")
        link.symlink_to(elsewhere)
        with self.assertRaisesRegex(UnsafeFolder, "is not a folder of this user"):
            DeviceLocks(link, {}, "")

    def test_the_default_folder_does_not_depend_on_the_environment(self):
        self.assertEqual(default_folder(), Path(f"/tmp/torch_testing_ext-leases-{os.getuid()}"))

    # -- fairness

    def test_who_reserves_gets_what_becomes_free(self):
        """As soon as it has waited for long."""
        locks = self.locks("a", "b")
        narrow, wide = (Leases(("na", "nb"), 1) for _ in range(2))
        other = OtherRuns(locks, narrow)
        waiting = OtherRuns(self.locks("a", "b"), wide)
        loop = JumpingLoop.of(self)
        locks.acquire("na")
        for _ in range(2):  # the second time, it has waited
            with waiting.choosing(wanted=True):
                self.assertEqual(wide.free_devices, 1)
            waiting.wait(True, loop)
            loop.run_for(RESERVE_AFTER + 0.1)
        self.assertTrue(waiting.are_awaited)
        locks.release("na")
        with other.choosing(wanted=True):
            self.assertEqual(narrow.free_devices, 0)
        with waiting.choosing(wanted=True):
            self.assertEqual(wide.free_devices, 2)
        waiting.wait(True, loop)
        self.assertFalse(waiting.are_awaited)
        with waiting.choosing(wanted=False):
            pass
        with other.choosing(wanted=True):
            self.assertEqual(narrow.free_devices, 2)

    def test_a_reservation_concerns_its_own_devices(self):
        one, other, same = self.locks("a"), self.locks("b"), self.locks("a", "b")
        self.assertTrue(one.reserve())
        self.assertEqual(other.reserved_by_others(), frozenset())
        self.assertEqual(same.reserved_by_others(), {"na"})
        self.assertFalse(same.reserve())
        one.end_reservation()
        self.assertTrue(same.reserve())


class IdentityTest(unittest.TestCase):
    def identities(self, environ, kind, count, uuids=(), **options):
        inventory = make_inventory(Options(**options), environ, kind, count, uuids)
        return [inventory.identity_of(name) for name in inventory.names]

    def test_identities(self):
        mask = {"CUDA_VISIBLE_DEVICES": "3,1"}
        self.assertEqual(self.identities(mask, "cuda", 2, ("u3", "u1")), ["cuda-u3", "cuda-u1"])
        self.assertEqual(self.identities(mask, "cuda", 2, ("u3", "u1"), gpus=("1",)), ["cuda-u1"])
        self.assertEqual(self.identities({}, "cuda", 2, ("u3", "u1")), ["cuda-u3", "cuda-u1"])
        self.assertEqual(self.identities(mask, "cuda", 2), ["cuda-3", "cuda-1"])
        self.assertEqual(self.identities(mask, "cuda", 2, ("same", "same")), ["cuda-3", "cuda-1"])
        self.assertEqual(
            self.identities({"CUDA_VISIBLE_DEVICES": "MIG-a,MIG-b"}, "cuda", 1, ("u",)), ["cuda-MIG-a", "cuda-MIG-b"]
        )


if __name__ == "__main__":
    unittest.main()

"""Devices that marked tests lease: no two tests have the same at one time, in whichever process they run."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
from kit.files import subject
from kit.processes import clean_environ, end
from kit.pytest_runs import PLUGIN, PytestCase, run_pytest

from torch_testing_ext._machine import accelerators
from torch_testing_ext._machine.device_locks import LEASE_FOLDER, DeviceLocks
from torch_testing_ext._pytest_ranks import item_in_parent
from torch_testing_ext.common_utils import run_tests
from torch_testing_ext.launch.device_leases import variables_of

FAKE = "TORCH_TESTING_EXT_FAKE_DEVICES"
SUBJECT = subject(__file__, "device_leases.py")
HOLDS = """
import os, pytest
@pytest.mark.world_size(1, devices=1)
def test_holds():
    with open("is_held", "w"): pass
    with open("let_go") as fifo: fifo.read()
"""
BESIDE_SHARED_RANKS = """
import pytest
@pytest.mark.world_size(2, devices=2, scope="module")
def test_first(): pass
@pytest.mark.world_size(1, devices=2)
def test_beside(): pass
@pytest.mark.world_size(2, devices=2, scope="module")
def test_last(): pass
"""
PASSES = """
import pytest
@pytest.mark.world_size(1, devices=1)
def test_waits(): open("has_run", "w").close()
"""


def config_with(base: Path) -> SimpleNamespace:
    """A configuration of pytest with this folder for temporary files."""
    return SimpleNamespace(_tmp_path_factory=SimpleNamespace(getbasetemp=lambda: base))


class DeviceLeasesTest(PytestCase):
    @pytest.mark.slow
    def test_between_workers(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            words = ("-p", "xdist", "-n", "2", f"-odist_lease_folder={folder}/leases")
            run = run_pytest({"test_leases.py": SUBJECT}, *words, folder=folder, **{FAKE: "a,b,c"})
        outcomes = dict.fromkeys(run.outcomes, "passed") | {"test_too_many": "skipped"}
        self.assertEqual(len(outcomes), 15)
        self.assertOutcomes(run, outcomes)

    def test_beside_ranks_that_others_share(self) -> None:
        """These keep their devices until the end of the module, and are idle meanwhile: waiting would last for ever."""
        with tempfile.TemporaryDirectory() as folder:
            words = f"-odist_lease_folder={folder}/leases"
            run = run_pytest({"test_beside.py": BESIDE_SHARED_RANKS}, words, **{FAKE: "a,b"})
        self.assertOutcomes(run, dict.fromkeys(("test_first", "test_beside", "test_last"), "passed"))

    @pytest.mark.slow
    def test_of_another_session_that_is_killed(self) -> None:
        """A test waits for the device of another one, whose pytest is killed; the kernel frees the device."""
        with tempfile.TemporaryDirectory() as folder:
            root = Path(folder)
            os.mkfifo(root / "is_held")
            os.mkfifo(root / "let_go")
            first = self.start(root, "test_holds.py", HOLDS)
            with open(root / "is_held") as fifo:
                fifo.read()
            second = self.start(root, "test_waits.py", PASSES)
            reservation = DeviceLocks(root / "leases", {"a": "fake-a"}, "this test")
            self.addCleanup(reservation.close)
            while not reservation.reserved_by_others() and second.poll() is None:
                time.sleep(0.05)
            self.assertIn("test_holds.py::test_holds", reservation.owner_of("a"))
            self.assertFalse((root / "has_run").exists())
            first.kill()
            text, _ = second.communicate()
            self.assertEqual(second.returncode, 0, text)
            self.assertTrue((root / "has_run").exists())

    def start(self, root: Path, name: str, source: str) -> subprocess.Popen[str]:
        (root / name).write_text(source)
        words = [sys.executable, "-m", "pytest", *PLUGIN, "-p", "no:cacheprovider", "-c", os.devnull]
        process = subprocess.Popen(
            [*words, f"--rootdir={root}", f"-odist_lease_folder={root}/leases", name],
            cwd=root,
            env=clean_environ(**{FAKE: "a"}),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.addCleanup(end, process)
        return process

    def test_a_folder_that_cannot_be_used(self) -> None:
        """Other runs may have the same devices then, which a warning says; tests of this session may not."""
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "base").mkdir()
            Path(folder, "file").touch()
            config = config_with(Path(folder, "base"))
            with (
                mock.patch.dict(os.environ, {LEASE_FOLDER: f"{folder}/file/leases"}),
                self.assertWarnsRegex(UserWarning, "other runs may use the same devices"),
                variables_of(item_in_parent.need_of_devices(config, "test_x", 1), ("a",)),
            ):
                other = DeviceLocks(Path(folder, "base", "torch_testing_ext-leases"), {"a": "fake-a"}, "another test")
                self.assertFalse(other.acquire("a"))
            self.assertTrue(other.acquire("a"))
            other.close()

    def test_what_ranks_see(self) -> None:
        """Masks only where some devices are not leased: what is known of the devices holds for the same masks."""
        for mask, count, shown in (
            ({}, 1, {"CUDA_VISIBLE_DEVICES": "0"}),
            ({}, 2, {}),
            ({"CUDA_VISIBLE_DEVICES": "3,1"}, 1, {"CUDA_VISIBLE_DEVICES": "3"}),
            ({"CUDA_VISIBLE_DEVICES": "3,1"}, 2, {}),
        ):
            with (
                self.subTest(mask=mask, count=count),
                tempfile.TemporaryDirectory() as folder,
                mock.patch.dict(os.environ, {**mask, LEASE_FOLDER: folder}),
                mock.patch.multiple(
                    accelerators,
                    runtime=lambda: "cuda",
                    device_count=lambda: 2,
                    device_uuids=lambda: ("u", "v"),
                ),
            ):
                with variables_of(
                    item_in_parent.need_of_devices(config_with(Path(folder)), "test_x", count)
                ) as environ:
                    leased = environ.pop("_TORCH_TESTING_EXT_LEASED").split(",")
                    self.assertEqual(environ, shown)
                    self.assertEqual(leased, ["cuda-u", "cuda-v"][:count])
                    other = DeviceLocks(Path(folder), {"x": "cuda-u"}, "another run")
                    self.assertFalse(other.acquire("x"))
                self.assertTrue(other.acquire("x"))
                other.close()


if __name__ == "__main__":
    run_tests()

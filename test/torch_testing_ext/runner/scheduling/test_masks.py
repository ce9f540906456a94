"""Masks that name devices which are not there, names of devices for --gpus, and drivers that do not answer.

The check `masks` of benchmarks/gpu/run does the same with real devices.
"""

import sys
import tempfile
import unittest
from pathlib import Path
from unittest import mock

from kit.invented import make_unit
from kit.nvml import linked, uuid

from torch_testing_ext._machine.device_needs import DeviceFacts, DeviceNeeds
from torch_testing_ext._machine.nvml import Nvml, gpus_by_name
from torch_testing_ext._machine.visible_devices import problem_of_mask
from torch_testing_ext._process import user_commands
from torch_testing_ext._process.questions import NoAnswer, Silence
from torch_testing_ext.runner import run_site
from torch_testing_ext.runner.model import Lease
from torch_testing_ext.runner.options import Action, CannotRun, Options, UsageError
from torch_testing_ext.runner.processes.fork_parent_messages import DevicesCounted
from torch_testing_ext.runner.scheduling.inventory import Inventory, environment_of, make_inventory, with_nvlinks
from torch_testing_ext.runner.scheduling.leases import Leases

MISSING = "names a device that is not there: "


class TestProblems(unittest.TestCase):
    """Covered on a GPU by the check `masks`."""

    def test_table(self):
        """Covered on a GPU by the check `masks`."""
        there = {"0", "1", "GPU-aa"}.__contains__
        for environ, kind, count, known, expected in (
            ({}, "cuda", 2, there, None),
            ({"CUDA_VISIBLE_DEVICES": "0,1"}, "cuda", 2, None, None),
            (
                {"CUDA_VISIBLE_DEVICES": "0,7"},
                "cuda",
                1,
                None,
                MISSING + "7",
            ),
            (
                {"CUDA_VISIBLE_DEVICES": "0,7"},
                "cuda",
                1,
                there,
                MISSING + "7",
            ),
            (
                {"CUDA_VISIBLE_DEVICES": "7"},
                None,
                0,
                there,
                MISSING + "7",
            ),
            (
                {"CUDA_VISIBLE_DEVICES": "GPU-zz"},
                None,
                0,
                there,
                MISSING + "GPU-zz",
            ),
            (
                {"CUDA_VISIBLE_DEVICES": "1,1"},
                None,
                0,
                there,
                "names device 1 twice, so that none is visible",
            ),
            ({"CUDA_VISIBLE_DEVICES": "0"}, None, 0, None, None),  # of habit, on a machine without devices
            ({"CUDA_VISIBLE_DEVICES": "0"}, None, 0, there, None),  # torch is built for the CPU
            ({"CUDA_VISIBLE_DEVICES": "0,-1,9"}, "cuda", 1, there, None),  # the rest is hidden on purpose
            ({"CUDA_VISIBLE_DEVICES": "-1"}, None, 0, there, None),
            ({"CUDA_VISIBLE_DEVICES": ""}, None, 0, there, None),
            ({"CUDA_VISIBLE_DEVICES": "NoDevFiles"}, None, 0, there, None),
            ({"CUDA_VISIBLE_DEVICES": "MIG-x,MIG-y"}, "cuda", 1, None, None),  # CUDA shows one
            ({"CUDA_VISIBLE_DEVICES": "MIG-x,MIG-y"}, "cuda", 1, there, None),
            (
                {"ROCR_VISIBLE_DEVICES": "0,9"},
                "hip",
                1,
                None,
                MISSING + "9",
            ),
            ({"ROCR_VISIBLE_DEVICES": "4,5", "HIP_VISIBLE_DEVICES": "0,1"}, "hip", 2, None, None),
            (
                {"HIP_VISIBLE_DEVICES": "0,5"},
                "hip",
                1,
                None,
                MISSING + "5",
            ),
            (
                {"ZE_AFFINITY_MASK": "0.1,3.0"},
                "xpu",
                1,
                None,
                MISSING + "3.0",
            ),
            ({"CUDA_VISIBLE_DEVICES": "9"}, "xpu", 1, None, None),
        ):
            with self.subTest(environ=environ, kind=kind, count=count):
                found = problem_of_mask(environ, kind, count, known)
                if expected is None:
                    self.assertIsNone(found)
                else:
                    self.assertIn(found, [f"{name}={mask} {expected}" for name, mask in environ.items()])


class TestGpusOption(unittest.TestCase):
    """Covered on a GPU by the check `masks`."""

    UUIDS = ("8932f937-d72c", "8932aaaa-d72c", "11112222-d72c")

    def chosen(self, *gpus, environ=None):
        return make_inventory(Options(gpus=gpus), environ or {}, "cuda", 3, self.UUIDS).names

    def test_uuids(self):
        """Covered on a GPU by the check `masks`."""
        self.assertEqual(("2",), self.chosen("GPU-11112222-d72c"))
        self.assertEqual(("2", "0"), self.chosen("GPU-1111", "GPU-8932f937"))
        self.assertEqual(("2", "1"), self.chosen("2", "gpu-8932AAAA"))
        mask = {"CUDA_VISIBLE_DEVICES": "GPU-8932f,GPU-8932a,GPU-1"}
        self.assertEqual(("GPU-1",), self.chosen("GPU-11112222-d72c", environ=mask))
        for wrong, why in (
            (("GPU-8932",), "GPU-8932 matches several devices: 0, 1"),
            (("GPU-77",), "GPU-77 is not visible"),
            (("GPU-",), "GPU- is not visible"),
            (("7",), "7 is not visible"),
            (("2", "GPU-1111"), "names device 2 twice"),
        ):
            with self.assertRaisesRegex(UsageError, why):
                self.chosen(*wrong)


class TestLeases(unittest.TestCase):
    def test_units_that_need_nvlink_get_devices_of_one_island(self):
        """Covered on a GPU by the check `topology`."""
        uuids = [uuid(at).removeprefix("GPU-") for at in (2, 0, 1, 3)]  # CUDA's order is not NVML's
        inventory = make_inventory(Options(), {}, "cuda", 4, uuids, [DeviceFacts()] * 4)
        gpus = gpus_by_name(inventory.names, inventory.identities, linked(4, (0, 3), (1, 2)), {})
        leases = Leases(inventory.names, 4, with_nvlinks(inventory, gpus).facts)
        needs = DeviceNeeds(nvlink=True)
        taken = [leases.take(make_unit(number, devices=2, of_devices=needs)).devices for number in range(2)]
        self.assertEqual([("0", "2"), ("1", "3")], taken)


class TestFindingDevices(unittest.TestCase):
    """Covered on a GPU by the check `masks`."""

    def discover(self, kind, count, gpus=(), error=None, why_none="", **environ):
        files = mock.Mock()
        files.count_devices.return_value = DevicesCounted(kind, count, why_none=why_none)
        with (
            mock.patch.object(run_site, "may_have_nvidia_gpus", lambda: True),
            mock.patch.object(run_site, "open_nvml", side_effect=error, return_value=mock.Mock(gpus=lambda: gpus)),
            mock.patch.dict("os.environ", environ, clear=True),
        ):
            return run_site.find_devices(files, Options())

    def test_a_mask_that_names_a_device_that_is_not_there(self):
        """Covered on a GPU by the check `masks`."""
        with self.assertRaisesRegex(UsageError, "CUDA_VISIBLE_DEVICES=5 names a device that is not there: 5"):
            self.discover(None, 0, linked(2), CUDA_VISIBLE_DEVICES="5")

    def test_a_driver_that_does_not_answer(self):
        """No check of benchmarks/gpu/run stops the driver."""
        with self.assertRaisesRegex(CannotRun, "^the NVIDIA driver has not answered within 30 s$"):
            self.discover("cuda", 1, error=NoAnswer("the NVIDIA driver has not answered within 30 s", Silence.LATE))

    def test_without_nvml(self):
        """Covered on a GPU by the check `masks`, if nvidia-ml-py is not installed."""
        inventory, warnings = self.discover("cuda", 2, error=NoAnswer("not installed", Silence.REFUSED))
        self.assertEqual((("0", "1"), ()), (inventory.names, warnings))

    def test_without_the_package_of_nvml_a_run_says_how_to_get_it(self):
        """Covered on a GPU by the check `masks`, if nvidia-ml-py is not installed."""
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "pynvml.py").write_text("raise ImportError")
            nvml = Nvml(path=[folder, *sys.path])
            self.addCleanup(nvml.close)
            work = mock.Mock(inventory=self.discover("cuda", 2)[0], options=Options())
            warnings = []
            with mock.patch.object(run_site, "open_nvml", nvml.gpus):
                checks = run_site.LocalSite(Options(), mock.Mock())._memory_return(
                    work, mock.Mock(), mock.Mock(), warnings
                )
        self.assertIsNone(checks)
        (warning,) = warnings
        self.assertIn("device memory is not checked between tests: the package nvidia-ml-py is not installed", warning)
        self.assertIn(user_commands.install("gpu"), warning)

    def test_a_mask_of_mig_instances(self):
        """Covered on a GPU in MIG mode by the check `masks`. CUDA shows one of them, and NVML is asked for none."""
        for gpus in (linked(2), ()):
            inventory, _ = self.discover("cuda", 1, gpus, CUDA_VISIBLE_DEVICES="MIG-a,MIG-b")
            self.assertEqual(("MIG-a", "MIG-b"), inventory.names)
            self.assertEqual({"CUDA_VISIBLE_DEVICES": "MIG-b"}, environment_of(Lease(("MIG-b",), (0,)), inventory))

    def test_a_mask_of_numbers_of_gpus_in_mig_mode(self):
        """No machine of benchmarks/gpu/run has such GPUs. CUDA shows one device to a process with both."""
        inventory, _ = self.discover("cuda", 1, linked(2), CUDA_VISIBLE_DEVICES="0,1")
        self.assertEqual(("0", "1"), inventory.names)
        with self.assertRaisesRegex(UsageError, "CUDA_VISIBLE_DEVICES=0,7 names a device that is not there: 7"):
            self.discover("cuda", 1, linked(2), CUDA_VISIBLE_DEVICES="0,7")

    def test_devices_that_cuda_cannot_use(self):
        """No machine of benchmarks/gpu/run has such a driver."""
        too_old = "The NVIDIA driver on your system is too old (found version 11040)"
        inventory, warnings = self.discover(None, 0, linked(2), why_none=too_old)
        self.assertEqual((None, ()), (inventory.kind, inventory.names))
        self.assertEqual((f"no GPU can be used, though NVML knows 2 GPUs: {too_old}",), warnings)
        _, warnings = self.discover(None, 0, error=NoAnswer("not installed", Silence.REFUSED), why_none=too_old)
        self.assertEqual((f"no GPU can be used: {too_old}",), warnings)

    def test_nothing_is_asked_for_a_plan(self):
        """No GPU is involved."""
        options = Options(fake_accelerators=2, action=Action.DRY_RUN)
        inventory = make_inventory(options, {"CUDA_VISIBLE_DEVICES": "9"}, None, 0)
        self.assertEqual(Inventory(("0", "1"), None, fake=True), inventory)


if __name__ == "__main__":
    unittest.main()

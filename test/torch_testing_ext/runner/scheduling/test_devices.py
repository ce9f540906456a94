"""Which devices a run may lease with which masks, and the environment of a leaseholder."""

import unittest

from torch_testing_ext._process.setting_names import FAKE_DEVICES
from torch_testing_ext.launch import launch_settings
from torch_testing_ext.runner.model import Lease
from torch_testing_ext.runner.options import Action, Options
from torch_testing_ext.runner.scheduling.inventory import Inventory, environment_of, make_inventory


def names(environ, kind, count, **options):
    return make_inventory(Options(**options), environ, kind, count).names


class InventoryTest(unittest.TestCase):
    def test_masks(self):
        """`count` is the number of devices that the driver shows with the mask."""
        for mask, count, expected in (
            (None, 3, ("0", "1", "2")),
            ("3,1", 2, ("3", "1")),
            (" 3 , +1", 2, ("3", "1")),
            ("", 0, ()),
            ("-1", 0, ()),
            ("0,2,-1,1", 2, ("0", "2")),  # the rest is hidden on purpose
            ("1,1", 0, ()),  # a duplicate: no device is visible
            ("01,2x", 2, ("1", "2")),  # read as C reads numbers
            ("GPU-8932f937-d72c,GPU-1", 2, ("GPU-8932f937-d72c", "GPU-1")),
        ):
            with self.subTest(mask=mask):
                environ = {} if mask is None else {"CUDA_VISIBLE_DEVICES": mask}
                self.assertEqual(names(environ, "cuda" if count else None, count), expected)

    def test_each_entry_of_a_mask_is_a_device(self):
        """CUDA shows a process one of these instances alone."""
        mask = "MIG-aa,MIG-GPU-bb/1/0,MIG-cc,MIG-aa"
        self.assertEqual(names({"CUDA_VISIBLE_DEVICES": mask}, "cuda", 1), ("MIG-aa", "MIG-GPU-bb/1/0", "MIG-cc"))

    def test_other_accelerators(self):
        for environ, kind, expected in (
            ({"HIP_VISIBLE_DEVICES": "4,5"}, "hip", ("4", "5")),
            ({"CUDA_VISIBLE_DEVICES": "4,5"}, "hip", ("4", "5")),
            ({"HIP_VISIBLE_DEVICES": "1,0", "CUDA_VISIBLE_DEVICES": "4,5"}, "hip", ("1", "0")),
            ({"ROCR_VISIBLE_DEVICES": "4,5"}, "hip", ("0", "1")),  # the remaining devices are renumbered
            ({"HIP_VISIBLE_DEVICES": "4,5"}, "cuda", ("0", "1")),
            ({"ZE_AFFINITY_MASK": "0.1,1.0"}, "xpu", ("0.1", "1.0")),
        ):
            with self.subTest(environ=environ, kind=kind):
                self.assertEqual(names(environ, kind, 2), expected)
        self.assertEqual(names({}, "mps", 1), ("0",))
        self.assertEqual(names({"STRANGE_VISIBLE_DEVICES": "4,5"}, "strange", 2), ("4", "5"))

    def test_gpus_option(self):
        mask = {"CUDA_VISIBLE_DEVICES": "4,5,6"}
        self.assertEqual(names(mask, "cuda", 3, gpus=0), ())
        self.assertEqual(names(mask, "cuda", 3, gpus=2), ("4", "5"))
        self.assertEqual(names(mask, "cuda", 3, gpus=("6", "4")), ("6", "4"))
        with self.assertRaisesRegex(ValueError, r"--gpus 4: only 3 visible \(4, 5, 6\)"):
            names(mask, "cuda", 3, gpus=4)
        with self.assertRaisesRegex(ValueError, r"--gpus: 0 is not visible \(4, 5, 6\)"):
            names(mask, "cuda", 3, gpus=("0",))
        with self.assertRaisesRegex(ValueError, "--gpus 1: torch sees no GPU on this machine. Leave"):
            names({}, None, 0, gpus=1)
        with self.assertRaisesRegex(ValueError, "--gpus 0,1: torch sees no GPU on this machine. Leave"):
            names({}, None, 0, gpus=("0", "1"))
        with self.assertRaisesRegex(ValueError, "--gpus 0,: torch sees no GPU on this machine. Leave"):
            names({}, None, 0, gpus=("0",))

    def test_a_plan_for_devices_that_are_not_there(self):
        planned = {"fake_accelerators": 3, "action": Action.DRY_RUN}
        found = make_inventory(Options(**planned), {"CUDA_VISIBLE_DEVICES": "7"}, "cuda", 1)
        self.assertEqual((found.names, found.fake, found.most_at_once), (("0", "1", "2"), True, 3))
        chosen = make_inventory(Options(**planned, gpus=("2", "0")), {}, None, 0)
        self.assertEqual((chosen.names, chosen.fake), (("2", "0"), True))


class EnvironmentTest(unittest.TestCase):
    def test_only_the_lease_is_visible(self):
        lease, nothing = Lease(("3", "1")), Lease()
        for kind, expected in (
            ("cuda", {"CUDA_VISIBLE_DEVICES": "3,1"}),
            ("hip", {"HIP_VISIBLE_DEVICES": "3,1", "CUDA_VISIBLE_DEVICES": "3,1"}),
            ("xpu", {"ZE_AFFINITY_MASK": "3,1"}),
            (None, {}),
        ):
            with self.subTest(kind=kind):
                self.assertEqual(environment_of(lease, Inventory(("3", "1"), kind)), expected)
        self.assertEqual(environment_of(nothing, Inventory(("3",), "cuda")), {"CUDA_VISIBLE_DEVICES": "-1"})

    def test_unused_devices_are_hidden_too(self):
        """Also devices that --gpus leaves out."""
        inventory = make_inventory(Options(gpus=0), {}, "cuda", 2)
        self.assertEqual(environment_of(Lease(), inventory), {"CUDA_VISIBLE_DEVICES": "-1"})

    def test_fake_devices_are_named_and_real_ones_hidden(self):
        environ = environment_of(Lease(("0", "3")), Inventory(("0", "1", "2", "3"), "cuda", fake=True))
        self.assertEqual(environ[FAKE_DEVICES], "0,3")
        self.assertIn(FAKE_DEVICES, launch_settings.known_names())
        self.assertEqual(environ["CUDA_VISIBLE_DEVICES"], "-1")
        self.assertEqual(set(environment_of(Lease(), Inventory(fake=True))), {FAKE_DEVICES})


if __name__ == "__main__":
    unittest.main()

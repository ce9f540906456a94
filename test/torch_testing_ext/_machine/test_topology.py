"""The GPUs of devices and their NVLinks, as tables. The check `topology` of benchmarks/gpu/run asks a real machine."""

import unittest

from kit.nvml import linked

from torch_testing_ext._machine.nvml import (
    ComputeMode,
    Gpu,
    gpus_by_name,
    matching_gpus,
    nvlinks,
    warnings_about_devices,
)

PAIRS = linked(6, (0, 3), (1, 4), (2, 5))


def by_number(gpus):
    return {str(gpu.index): gpu for gpu in gpus}


class TestMatching(unittest.TestCase):
    """Covered on a GPU by the check `masks`."""

    GPUS = (Gpu(0, "GPU-aaaa-1"), Gpu(1, "GPU-bbbb-1"), Gpu(2, "GPU-bbcc-1"))

    def test_uuids(self):
        """Covered on a GPU by the check `masks`."""
        for text, expected in (
            ("GPU-bbbb-1", [1]),
            ("GPU-bbb", [1]),
            ("bbcc-1", [2]),  # as torch writes them
            ("gpu-BB", [1, 2]),
            ("MIG-3333-4", []),
            ("GPU-x", []),
            ("1", []),
            ("", []),
            ("GPU-", []),
        ):
            self.assertEqual(expected, [gpu.index for gpu in matching_gpus(text, self.GPUS)], text)

    def test_names_of_a_run(self):
        """Covered on a GPU by the check `masks`."""

        def found(names, identities, **environ):
            return {name: gpu.index for name, gpu in gpus_by_name(names, identities, self.GPUS, environ).items()}

        self.assertEqual({"0": 2, "1": 1}, found("01", {"0": "bbcc-1", "1": "bbbb-1"}))  # CUDA's own order
        self.assertEqual({}, found("01", {}))
        self.assertEqual({"0": 0, "1": 1}, found("01", {}, CUDA_DEVICE_ORDER="PCI_BUS_ID"))
        self.assertEqual({}, found("01", {}, CUDA_DEVICE_ORDER="FASTEST_FIRST"))
        self.assertEqual({"GPU-bbcc": 2}, found(["GPU-bbcc", "GPU-b"], {}))  # the other may be either
        self.assertEqual({}, found("7", {}, CUDA_DEVICE_ORDER="PCI_BUS_ID"))

    def test_nvlinks(self):
        """Covered on a GPU by the check `topology`."""
        names = ("3", "0", "x")
        self.assertEqual([(1,), (0,), None], nvlinks(names, by_number(PAIRS)))


class TestWarnings(unittest.TestCase):
    def test_compute_modes(self):
        """The check `masks` of benchmarks/gpu/run reports the compute mode; it does not change it."""
        exclusive = Gpu(0, "a", compute_mode=ComputeMode.EXCLUSIVE_PROCESS)
        prohibited = Gpu(1, "b", compute_mode=ComputeMode.PROHIBITED)
        self.assertEqual([], warnings_about_devices({"0": Gpu(0, "a")}))
        (text,) = warnings_about_devices({"0": exclusive, "3": exclusive, "1": Gpu(1, "b")})
        self.assertIn("the compute mode of devices 0, 3 is exclusive process: only one process at a time", text)
        self.assertIn("device 7 is prohibited: no process can use it", warnings_about_devices({"7": prohibited})[0])


if __name__ == "__main__":
    unittest.main()

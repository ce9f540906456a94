"""Needs of devices that a runner reads before it starts a test: memory, compute capability, peer access, NVLink.

On real devices: the check `needs` of benchmarks/gpu/run.
"""

import dataclasses
import unittest
from unittest import mock

from torch_testing_ext._machine import accelerators
from torch_testing_ext._machine.device_needs import DeviceFacts
from torch_testing_ext._machine.nvml import Gpu, with_nvlinks
from torch_testing_ext._process.questions import NoAnswer, Silence
from torch_testing_ext._testing.marks.needs import Skipped, needs_of
from torch_testing_ext.common_distributed import (
    requires_memory,
    requires_nvlink,
    requires_peer_access,
    requires_sm,
    skip_if_lt_x_gpu,
)

GIB = 2**30
H100 = DeviceFacts("H100", 80 * GIB, (9, 0), (1,))
T4 = DeviceFacts("T4", 16 * GIB, (7, 5))


def on(*facts):
    """With devices of which this is known."""
    return mock.patch.multiple(accelerators, device_count=lambda: len(facts), device_facts=lambda: facts)


class DeviceNeedsTest(unittest.TestCase):
    def skip_of(self, decorate, *facts):
        @decorate
        def test():
            return "ran"

        with on(*facts):
            try:
                self.assertEqual(test(), "ran")
            except Skipped as skip:
                return str(skip)
        return None

    def test_nvlink_as_nvml_says(self):
        gpus = [
            Gpu(0, "GPU-a", nvlinks=frozenset(["GPU-b"])),
            Gpu(1, "GPU-b", nvlinks=frozenset(["GPU-a"])),
            Gpu(2, "GPU-c"),
        ]
        nvml = mock.Mock(gpus=lambda: tuple(gpus))
        three = with_nvlinks((H100, H100, T4), ("b", "a", "c"), lambda: nvml)
        self.assertEqual([one.nvlinks for one in three], [(1,), (0,), ()])
        nvml.close.assert_called_once_with()
        unknown = with_nvlinks((H100, H100), ("b", "z"), lambda: nvml)
        self.assertEqual([one.nvlinks for one in unknown], [(), None])
        self.assertEqual(with_nvlinks((H100, H100), (), lambda: nvml), (H100, H100))
        failing = mock.Mock(side_effect=NoAnswer("no driver", Silence.REFUSED))
        self.assertEqual(with_nvlinks((H100, H100), ("a", "b"), failing), (H100, H100))

    def test_met(self):
        for decorate in (requires_memory("20 GB"), requires_sm(9), requires_sm(8, 6)):
            self.assertIsNone(self.skip_of(decorate, H100))
        second = dataclasses.replace(H100, peers=(0,))
        self.assertIsNone(self.skip_of(requires_peer_access(), H100, second))

    def test_unmet(self):
        for decorate, facts, expected in (
            (requires_memory("20 GB"), (T4,), r"needs 18\.6 GiB of memory: none of 1 devices, 1 needed \(T4 has 16"),
            (requires_memory("20 GB"), (H100, T4), "1 of 2 devices, 2 needed"),
            (requires_sm(9), (T4,), r"needs compute capability 9\.0: .*T4 has 7\.5"),
            (requires_peer_access(), (H100, H100), "they cannot read each other's memory"),
            (requires_nvlink(), (H100, H100), "NVLink"),
            (requires_memory("20 GB"), (), "No accelerator"),
            (requires_peer_access(), (H100,), "Need at least 2 accelerator devices"),
            (requires_nvlink(), (H100,), "Need at least 2 accelerator devices"),
        ):
            with self.subTest(expected=expected):
                self.assertRegex(self.skip_of(decorate, *facts) or "it ran", expected)

    def test_a_runner_can_read_them(self):
        @requires_memory("20 GB")
        @skip_if_lt_x_gpu(4)
        @requires_sm(9)
        def test():
            pass

        self.assertEqual([need.of_devices.memory for need in needs_of(test)], [20 * 10**9, 0, 0])
        self.assertEqual([need.devices for need in needs_of(test)], [1, 4, 1])
        self.assertEqual(test._min_gpus_required, 4)

    def test_bad_amounts(self):
        with self.assertRaisesRegex(ValueError, "'20' is not an amount of memory"):
            requires_memory("20")
        for arguments in ((9.0,), (True,), (9, -1)):
            with self.assertRaisesRegex(ValueError, "write two numbers"):
                requires_sm(*arguments)


if __name__ == "__main__":
    unittest.main()

"""How ranks share devices, and which devices have what a test needs: pure decisions, as tables.

On real devices: the checks `suites-ranks-per-gpu` and `needs` of benchmarks/gpu/run.
"""

import os
import unittest
from unittest import mock

from torch_testing_ext._machine import device_sharing
from torch_testing_ext._machine.device_needs import (
    DeviceFacts,
    DeviceNeeds,
    facts_from,
    facts_of_chosen,
    groups_that_meet,
    why_not,
)

GIB = 2**30


def facts(memory=80 * GIB, capability=(9, 0), peers=(), nvlinks=None, name="H100"):
    return DeviceFacts(name, memory, capability, tuple(peers), nvlinks)


class SharingTest(unittest.TestCase):
    """Covered on a GPU by the check suites-ranks-per-gpu."""

    def test_each_rank_has_a_device(self):
        for world_size, devices, expected in ((4, 1, [0, 0, 0, 0]), (4, 2, [0, 1, 0, 1]), (3, 4, [0, 1, 2])):
            found = [device_sharing.device_of(rank, devices) for rank in range(world_size)]
            self.assertEqual(found, expected)
            for rank in range(world_size):
                self.assertEqual(
                    device_sharing.ranks_on_device(rank, world_size, devices),
                    expected.count(expected[rank]),
                    (rank, devices),
                )

    def test_the_ranks_of_a_device_do_not_want_more_than_it_has(self):
        for total in (8 * GIB, 80 * GIB):
            for ranks in (1, 2, 3, 4, 8):
                used = ranks * (device_sharing.fraction_for(total, ranks) * total + device_sharing.CONTEXT)
                self.assertLessEqual(used, total + 1)
                self.assertGreater(used, 0.99 * total)

    def test_too_many_ranks_for_the_memory(self):
        self.assertIsNone(device_sharing.why_too_many(4, 80 * GIB, "0"))
        self.assertEqual(
            device_sharing.why_too_many(200, 80 * GIB, "0"),
            "200 ranks on one GPU would have 410 MiB each of the 80.0 GiB of device 0, and a rank needs 856 MiB before "
            "it has a tensor: at most 95",
        )
        self.assertIsNone(device_sharing.why_too_many(95, 80 * GIB, "0"))
        self.assertIsNotNone(device_sharing.why_too_many(96, 80 * GIB, "0"))

    def test_the_backend_of_ranks_that_share(self):
        for nccl, hip, expected in (
            ((2, 30, 7), False, "nccl"),
            ((2, 30), False, "nccl"),
            ((3, 0, 0), False, "nccl"),
            ((2, 29, 9), False, "gloo"),
            ((), False, "gloo"),
            ((2, 31, 1), True, "gloo"),
        ):
            self.assertEqual(device_sharing.shared_backend(nccl, hip, {}), expected, (nccl, hip))
            # Of a user for whom NCCL's experiment hangs.
            self.assertEqual(device_sharing.shared_backend(nccl, hip, {device_sharing.NCCL_SHARES: "0"}), "gloo")

    def test_nothing_is_shared_by_default(self):
        with mock.patch.dict("os.environ"):
            os.environ.pop(device_sharing.RANKS_PER_GPU, None)
            self.assertEqual(device_sharing.ranks_per_device(), 1)
            for text in ("0", "-1", "x", "1.5"):
                os.environ[device_sharing.RANKS_PER_GPU] = text
                with self.assertRaisesRegex(ValueError, f"RANKS_PER_GPU='{text}' is not valid; use"):
                    device_sharing.ranks_per_device()

    def test_amounts_of_memory(self):
        for text, expected in (
            ("20 GB", 20 * 10**9),
            ("20GB", 20 * 10**9),
            ("512 MiB", 512 * 2**20),
            ("1.5 gib", 3 * 2**29),
            ("0.5 GB", 5 * 10**8),
        ):
            self.assertEqual(device_sharing.read_bytes(text), expected)
        for text in ("20", "", "GB", "-1 GB", "0 GB", "nan GB", "inf GB", "20 B", "20 GB more", f"{2**20} TB"):
            with self.assertRaisesRegex(ValueError, "is not an amount of memory: write a number and a unit"):
                device_sharing.read_bytes(text)


class DeviceNeedsTest(unittest.TestCase):
    """Covered on a GPU by the check needs."""

    def test_what_devices_lack(self):
        small, large = facts(16 * GIB, (7, 5), name="T4"), facts()
        for have, needs, count, expected in (
            ((large,), DeviceNeeds(memory=20 * GIB), 1, None),
            ((small, large), DeviceNeeds(memory=20 * GIB), 1, None),
            (
                (small, large),
                DeviceNeeds(memory=20 * GIB),
                2,
                "1 of 2 devices, 2 needed (T4 has 16.0 GiB)",
            ),
            (
                (small, small),
                DeviceNeeds(memory=20 * GIB, capability=(9, 0)),
                1,
                "none of 2 devices, 1 needed (T4 has 16.0 GiB and 7.5)",
            ),
            ((), DeviceNeeds(memory=1), 1, "there is no device of which this is known"),
        ):
            self.assertEqual(why_not(have, needs, count), expected)

    def test_connections(self):
        pairs = [facts(peers=[1], nvlinks=(1,)), facts(peers=[0], nvlinks=(0,)), facts(), facts(peers=[0, 1, 2])]
        self.assertEqual(list(groups_that_meet(pairs, DeviceNeeds(peer_access=True), 2)), [(0, 1)])
        self.assertEqual(list(groups_that_meet(pairs, DeviceNeeds(nvlink=True), 2)), [(0, 1)])
        self.assertEqual(list(groups_that_meet(pairs, DeviceNeeds(peer_access=True), 2, [1, 2, 3])), [])
        self.assertEqual(list(groups_that_meet(pairs, DeviceNeeds(peer_access=True), 1)), [(0,), (1,), (2,), (3,)])
        self.assertEqual(why_not(pairs, DeviceNeeds(peer_access=True), 3), "they cannot read each other's memory")
        self.assertEqual(why_not(pairs, DeviceNeeds(nvlink=True), 3), "NVML does not say which devices NVLink connects")
        none = [facts(nvlinks=()), facts(nvlinks=())]
        self.assertEqual(why_not(none, DeviceNeeds(nvlink=True), 2), "NVLink does not connect them")

    def test_chosen_devices_are_numbered_anew(self):
        three = (facts(peers=[1, 2], nvlinks=(2,)), facts(peers=[0]), facts(peers=[0], nvlinks=(0,), name="last"))
        self.assertEqual(
            facts_of_chosen(three, [2, 0]),
            (facts(peers=[1], nvlinks=(1,), name="last"), facts(peers=[0], nvlinks=(0,))),
        )

    def test_needs_join(self):
        joined = DeviceNeeds.of_all([DeviceNeeds(memory=5), DeviceNeeds(memory=3, nvlink=True), DeviceNeeds()])
        self.assertEqual(joined, DeviceNeeds(memory=5, nvlink=True))
        self.assertFalse(DeviceNeeds.of_all([]))

    def test_facts_of_another_process(self):
        sent = [{"name": "H100", "memory": 5, "capability": [9, 0], "peers": [1]}]
        self.assertEqual(facts_from(sent), (DeviceFacts("H100", 5, (9, 0), (1,)),))
        self.assertEqual(facts_from((None, 0)), ())  # where no device can exist


if __name__ == "__main__":
    unittest.main()

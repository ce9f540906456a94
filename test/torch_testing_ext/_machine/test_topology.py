"""Which devices a unit gets, as a table of machines. The check `topology` of benchmarks/gpu/run compares what NVML
says of a real machine with CUDA's own answers."""

import dataclasses
import itertools
import unittest

from kit.nvml import linked, uuid

from torch_testing_ext._machine.nvml import (
    ComputeMode,
    Gpu,
    GpuLink,
    MigInstance,
    best_group,
    gpus_by_name,
    matching_gpus,
    nvlinks,
    preferred_devices,
    warnings_about_devices,
)

PAIRS = linked(6, (0, 3), (1, 4), (2, 5))
UNEVEN = linked(6, (0, 1, 2, 3), (4, 5))
SWITCHED = linked(8, range(8), nodes=(0, 0, 0, 0, 1, 1, 1, 1))
NODES = linked(4, nodes=(0, 1, 0, 1))
# A cube of four GPUs with links along its edges: no three are all joined.
RING = tuple(
    dataclasses.replace(gpu, links={uuid(other): GpuLink(nvlink=(gpu.index + other) % 2 == 1) for other in range(4)})
    for gpu in linked(4)
)
BUS = tuple(
    dataclasses.replace(
        gpu, links={uuid(other): GpuLink(distance=10 if gpu.index // 2 == other // 2 else 40) for other in range(4)}
    )
    for gpu in linked(4)
)


def by_number(gpus):
    return {str(gpu.index): gpu for gpu in gpus}


class TestPreferred(unittest.TestCase):
    """Covered on a GPU by the check `topology`."""

    def test_table(self):
        """Covered on a GPU by the check `topology`."""
        for gpus, free, count, expected in (
            (PAIRS, "012345", 1, "0"),
            (PAIRS, "012345", 2, "03"),
            (PAIRS, "12345", 2, "14"),
            (PAIRS, "01", 2, "01"),  # no island is free
            (PAIRS, "0125", 2, "25"),
            (UNEVEN, "012345", 2, "45"),  # the island of four stays whole
            (UNEVEN, "012345", 3, "012"),
            (UNEVEN, "012345", 4, "0123"),
            (UNEVEN, "2345", 2, "23"),
            (UNEVEN, "012345", 6, "012345"),
            (SWITCHED, "01234567", 2, "01"),
            (SWITCHED, "1234567", 4, "4567"),  # all are joined: one NUMA node is better than two
            (SWITCHED, "124567", 2, "12"),  # the smaller rest of a node, so that the other stays whole
            (NODES, "0123", 2, "02"),
            (NODES, "123", 2, "13"),
            (NODES, "12", 2, "12"),
            (RING, "0123", 2, "01"),
            (RING, "02", 2, "02"),
            (BUS, "1203", 2, "10"),
            (BUS, "013", 2, "01"),
            (linked(3), "210", 2, "21"),  # nothing speaks for any: the first
        ):
            with self.subTest(free=free, count=count):
                self.assertEqual("".join(preferred_devices(tuple(free), count, by_number(gpus))), expected)

    def test_without_nvml_the_first_are_taken(self):
        """No GPU is involved."""
        self.assertEqual(("5", "0"), preferred_devices(("5", "0", "3"), 2, {}))
        self.assertEqual(("5", "0"), preferred_devices(("5", "0", "3"), 2, {"5": PAIRS[5], "0": PAIRS[0]}))

    def test_too_many_devices_to_compare_all_groups(self):
        """No GPU is involved."""
        many = linked(40, range(20, 40))
        free = tuple(map(str, range(40)))
        self.assertEqual(free[:20], preferred_devices(free, 20, by_number(many)))

    def test_only_groups_that_meet_other_needs(self):
        """No GPU is involved."""
        groups = iter([("0", "1"), ("1", "4"), ("2", "3")])
        self.assertEqual(("1", "4"), best_group(groups, tuple("012345"), 2, by_number(PAIRS)))
        self.assertIsNone(best_group(iter([]), tuple("01"), 2, by_number(PAIRS)))

    def test_every_choice_is_of_free_devices(self):
        """No GPU is involved."""
        for free in itertools.permutations("0123", 3):
            for count in (1, 2, 3):
                found = preferred_devices(free, count, by_number(RING))
                self.assertEqual((count, count), (len(found), len(set(found) & set(free))))


class TestMatching(unittest.TestCase):
    """Covered on a GPU by the check `masks`."""

    MIG = Gpu(0, "GPU-aaaa-1", mig=True, instances=(MigInstance("MIG-1111-2", 1), MigInstance("MIG-3333-4", 1)))
    GPUS = (MIG, Gpu(1, "GPU-bbbb-1"), Gpu(2, "GPU-bbcc-1"))

    def test_uuids(self):
        """Covered on a GPU by the check `masks`."""
        for text, expected in (
            ("GPU-bbbb-1", [1]),
            ("GPU-bbb", [1]),
            ("bbcc-1", [2]),  # as torch writes them
            ("gpu-BB", [1, 2]),
            ("MIG-3333-4", [0]),
            ("MIG-3", [0]),
            ("MIG-GPU-aaaa-1/2/0", [0]),
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

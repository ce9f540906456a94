"""On machines with 0 to 8 accelerators the suites run where docs/contribute/suites.md says.

No test that runs without devices skips with some, and none on the CPU holds a device.
"""

import sys
import unittest

import pytest
from kit.processes import ROOT
from kit.with_accelerators import in_a_fork

sys.path.insert(0, str(ROOT / "docs" / "tools"))
import suites_by_devices
from suites_by_devices import BACKEND, KIND, MACHINES, Place


@pytest.mark.slow
class TestSuites(unittest.TestCase):
    @in_a_fork
    def test_the_table(self):
        """The files are imported and listed with each number of devices; nothing runs."""
        places = suites_by_devices.places_of(suites_by_devices.suites())
        self.assertEqual(list(suites_by_devices.problems(places)), [])
        page = suites_by_devices.PAGE.read_text(encoding="utf-8")
        self.assertEqual(suites_by_devices.with_table(page, suites_by_devices.table(places)), page)


class TestProblems(unittest.TestCase):
    """What the table must not have. The first is of FSDP's tests, the second of the property suites, as they were."""

    CPU, SKIPS = Place(4, 0, "cpu"), Place(4, 4, KIND, skips=True)
    DEVICES = Place(4, 4, KIND, backend=BACKEND)

    def problems(self, *places):
        return [text.partition(" ")[2] for text in suites_by_devices.problems({"test_x.py": {"test_it": places}})]

    def test_a_test_that_skips_with_some_devices(self):
        found = self.problems(self.CPU, self.SKIPS, self.SKIPS, self.SKIPS, self.DEVICES, self.DEVICES)
        self.assertEqual(found, [f"test_it runs without devices, and skips with {count}" for count in (1, 2, 3)])

    def test_a_test_on_the_cpu_that_holds_devices(self):
        found = self.problems(*[self.CPU] * 4, Place(4, 4, "cpu"), Place(4, 4, "cpu"))
        self.assertEqual(found, [f"test_it runs on the CPU, and holds 4 of {count} devices" for count in (4, 8)])

    def test_a_test_that_leases_too_few(self):
        found = self.problems(*[self.CPU] * 4, Place(4, 0, KIND), self.DEVICES)
        self.assertEqual(found, ["test_it uses devices that it does not lease, of 4"])

    def test_a_test_with_the_backend_of_another_device(self):
        found = self.problems(*[self.CPU] * 3, Place(4, 0, "cpu", backend=BACKEND), Place(4, 4, KIND), self.DEVICES)
        self.assertEqual(
            found,
            [
                f"test_it communicates over {BACKEND}, with 0 of 3 devices",
                "test_it communicates over gloo, with 4 of 4 devices",
            ],
        )

    def test_one_that_needs_devices(self):
        self.assertEqual(self.problems(*[self.SKIPS] * 4, *[self.DEVICES] * 2), [])
        self.assertEqual(len(MACHINES), 6)


if __name__ == "__main__":
    unittest.main()

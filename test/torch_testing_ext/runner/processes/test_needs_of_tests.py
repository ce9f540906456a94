"""How many devices a test leases: those that it declares, and none if it needs none."""

import os
import sys
from unittest import TestCase, mock

import needs_subject as cases
import pytest
from kit.project import Project

from torch_testing_ext.common_utils import run_tests
from torch_testing_ext.runner import events, model
from torch_testing_ext.runner.processes.names_of_tests import NamedTest
from torch_testing_ext.runner.processes.needs_of_tests import describe
from torch_testing_ext.runner.scheduling.leases import slots_of
from torch_testing_ext.upstream import drop_in

DEVICES = 4


def devices(cls, method="test_undeclared", available=DEVICES):
    return describe(NamedTest(cls.__name__, method, cls(method)), "test_x.py", available).devices


class NeedsTest(TestCase):
    def test_what_is_declared(self):
        for method, expected in {
            "test_undeclared": 0,
            "test_two": 2,
            "test_two_or_cpu": 2,
            "test_one": 1,
            "test_world_of_three": 3,
            "test_too_many": 8,
            "test_marked_by_pytorch": 2,
            "test_gloo": 0,
            "test_nccl": 1,
        }.items():
            with self.subTest(method):
                self.assertEqual(devices(cases.PlainTest, method), expected)

    def test_without_devices(self):
        self.assertEqual(devices(cases.PlainTest, "test_two_or_cpu", 0), 0)
        self.assertEqual(devices(cases.PlainTest, "test_two", 0), 2)  # it is skipped for this reason
        self.assertEqual(devices(cases.OnCuda, available=0), 0)  # it says by itself what is missing

    def test_by_class(self):
        for cls, expected in {
            cases.OnCuda: 1,
            cases.OnSecondCuda: 1,
            cases.OnCPU: 0,
            cases.BrokenDeviceType: 0,
            cases.NCCLClass: 1,
            cases.Ranks: 2,
            cases.RanksOnCPU: 0,
            cases.RanksOnCPUByMethod: 0,
        }.items():
            with self.subTest(cls.__name__):
                self.assertEqual(devices(cls), expected)

    def test_ranks_on_gloo(self):
        self.assertEqual(devices(cases.Ranks, "test_gloo"), 0)
        self.assertEqual(devices(cases.Ranks, "test_gloo_on_three"), 3)

    def test_ranks_in_one_process_take_one_slot(self):
        for cls, processes in {cases.PlainTest: 1, cases.Ranks: 2, cases.Threads: 1, cases.LocalRanks: 1}.items():
            with self.subTest(cls.__name__):
                test = describe(NamedTest(cls.__name__, "test_undeclared", cls("test_undeclared")), "test_x.py", 0)
                self.assertEqual(slots_of(model.Unit(0, (test,)), 8), processes)

    def test_tests_of_pytorch_may_use_a_device_without_a_word(self):
        with mock.patch.object(sys, "meta_path", [drop_in._Finder(), *sys.meta_path]):
            self.assertEqual(devices(cases.PlainTest), 1)
            self.assertEqual(devices(cases.OnCPU), 0)


@pytest.mark.slow
class QueueTest(TestCase):
    def test_tests_that_need_none_see_none_and_do_not_wait_for_one(self):
        """Both run at the same time, although there is one device: each waits for the other."""
        project = Project()
        self.addCleanup(project.close)
        a, b = project.root / "a", project.root / "b"
        file = project.write(
            f"""
            import os, unittest
            from torch_testing_ext.common_distributed import skip_if_lt_x_gpu
            class T(unittest.TestCase):
                def meet(self, mine, other):
                    print(repr(os.environ["TORCH_TESTING_EXT_FAKE_DEVICES"]))
                    mine(), other()
                def test_a(self): self.meet(lambda: open({str(a)!r}, "w"), lambda: open({str(b)!r}))
                def test_b(self): self.meet(lambda: open({str(a)!r}), lambda: open({str(b)!r}, "w"))
                @skip_if_lt_x_gpu(1, allow_cpu=True)
                def test_one(self): print(os.environ["TORCH_TESTING_EXT_FAKE_DEVICES"])
            """
        )
        for fifo in a, b:
            os.mkfifo(fifo)
        ran = project.run(file, devices=1, jobs=2, timeout=60.0)
        self.assertEqual(ran.outcomes, dict.fromkeys(("test_a", "test_b", "test_one"), "passed"))
        self.assertEqual([ran[name].output for name in ("test_a", "test_b", "test_one")], ["''\n", "''\n", "0\n"])
        leases = {event.unit.tests[0].id.method: event.lease for event in ran.recorder.of(events.UnitBegan)}
        self.assertEqual((leases["test_a"].devices, len(leases["test_a"].slots)), ((), 1))


if __name__ == "__main__":
    run_tests()

"""A lease is over when the memory of its devices is back; the most memory that tests have had is in the reports.

A stand-in answers for NVML. On real devices: the check `memory-back` of benchmarks/gpu/run.
"""

import os
import subprocess
import unittest
from pathlib import Path
from unittest import mock

import pytest
from kit.files import subject
from kit.invented import make_attempt, make_test
from kit.jumping_loop import JumpingLoop
from kit.project import EventRecorder, Project

from torch_testing_ext import launch
from torch_testing_ext._machine.nvml import GpuProcess, Usage
from torch_testing_ext._process import system
from torch_testing_ext._process.questions import NoAnswer, Silence
from torch_testing_ext._tests import notes
from torch_testing_ext._tests.outcomes import TestOutcome
from torch_testing_ext.launch import device_memory
from torch_testing_ext.runner import events
from torch_testing_ext.runner.engine.engine import Engine
from torch_testing_ext.runner.engine.memory_return import (
    LOOK_AT_MEMORY,
    MEMORY_MARGIN,
    MEMORY_TIMEOUT,
    HeldDevice,
    MemoryReturn,
    describe_process,
    taken_by_others,
    uuids_for,
    why_held,
    with_held,
)
from torch_testing_ext.runner.model import DeviceMemory, Lease
from torch_testing_ext.runner.options import Options
from torch_testing_ext.runner.processes.file_processes import FileProcesses
from torch_testing_ext.runner.processes.preloaded_client import WarmUp
from torch_testing_ext.runner.report import wording
from torch_testing_ext.runner.run_site import LocalSite
from torch_testing_ext.runner.scheduling.inventory import Inventory
from torch_testing_ext.runner.scheduling.leases import Leases
from torch_testing_ext.runner.scheduling.plan import plan
from torch_testing_ext.runner.scheduling.unit_queue import Queue

GIB = 2**30


class FakeNvml:
    """Gives one answer after the other, the last for ever: a number of bytes in use of each device, or an error."""

    def __init__(self, *answers):
        self.answers = list(answers)
        self.asked = 0

    def gpus(self):
        return ()

    def usage(self):
        self.asked += 1
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        return {uuid: one if isinstance(one, Usage) else Usage(one) for uuid, one in answer.items()}

    def close(self):
        pass


class MemoryReturnTest(unittest.TestCase):
    def setUp(self):
        self.loop = JumpingLoop.of(self)
        self.warnings = []

    def after_lease(self, *answers, names=("a",), ours=()):
        """The answers to a lease of these devices that has ended. The first answer of NVML is the baseline."""
        nvml = FakeNvml(*answers)
        uuids = {"a": "GPU-a", "b": "GPU-b"}
        memory = MemoryReturn(self.loop, nvml, uuids, self.warnings.append)
        memory.is_ours = lambda pid: pid in ours
        found = []
        memory.leased(names)
        memory.when_back(names, found.append)
        while memory.is_waiting:
            self.assertEqual(found, [])
            self.loop.step()
        self.assertEqual(len(found), 1)
        return found[0], nvml.asked

    def test_back_at_once(self):
        self.assertEqual(self.after_lease({"GPU-a": GIB}, {"GPU-a": GIB + MEMORY_MARGIN}), ((), 2))

    def test_back_after_a_while(self):
        answers = {"GPU-a": GIB}, {"GPU-a": 5 * GIB}, {"GPU-a": 3 * GIB}, {"GPU-a": GIB}
        self.assertEqual(self.after_lease(*answers), ((), 4))

    def test_never_back(self):
        after = Usage(3 * GIB, (GpuProcess(1), GpuProcess(2**22 + 7)))
        began = self.loop.now
        (held,), asked = self.after_lease({"GPU-a": Usage(GIB, (GpuProcess(1),))}, {"GPU-a": after})
        # The baseline, then every 0.2 s for 10 s.
        self.assertAlmostEqual(self.loop.now - began, MEMORY_TIMEOUT, delta=LOOK_AT_MEMORY)
        self.assertAlmostEqual(asked, 2 + MEMORY_TIMEOUT / LOOK_AT_MEMORY, delta=1)
        holder = describe_process(2**22 + 7)
        self.assertEqual(
            str(held),
            f"device a still had 2.0 GiB more in use than before (held by {holder}) 10 s after its test ended",
        )

    def test_what_others_take(self):
        """A notebook that was there grows, and a server starts, while a test runs on the device."""
        notebook, server, test = 101, 102, 103
        before = Usage(GIB, (GpuProcess(notebook, GIB),))

        def after(of_test):
            processes = [GpuProcess(notebook, 3 * GIB), GpuProcess(server, GIB)]
            processes += [GpuProcess(test, of_test)] if of_test else []
            return {"GPU-a": Usage(4 * GIB + of_test, tuple(processes))}

        self.assertEqual(self.after_lease({"GPU-a": before}, after(0), ours=(test,)), ((), 2))
        holders = f"{describe_process(notebook)}, {describe_process(server)}"
        taken = f"device a: other programs have taken 3.0 GiB of its memory during a test: {holders}"
        self.assertEqual(self.warnings, [taken])
        (held,), _ = self.after_lease({"GPU-a": before}, after(GIB), ours=(test,))
        self.assertIn("still had 1.0 GiB more in use than before", str(held))

    def test_numbers_that_do_not_tell_whose_they_are(self):
        """In a container, a new process may be of the test; one that was there is not."""
        before = Usage(GIB, (GpuProcess(101, GIB),))
        grown, new = Usage(2 * GIB, (GpuProcess(101, 2 * GIB),)), Usage(2 * GIB, (GpuProcess(102, GIB),))
        self.assertEqual(taken_by_others(before, grown, lambda pid: True), {101: GIB})
        self.assertEqual(taken_by_others(before, new, lambda pid: True), {})
        unknown = Usage(2 * GIB, (GpuProcess(102),))
        self.assertEqual(taken_by_others(before, unknown, lambda pid: False), {})

    def test_only_the_device_that_is_held(self):
        before, after = {"GPU-a": 0, "GPU-b": 0}, {"GPU-a": 0, "GPU-b": GIB}
        (held,), _ = self.after_lease(before, after, names=("a", "b"))
        self.assertEqual(held.name, "b")

    def test_nvml_fails_in_between(self):
        self.assertEqual(self.after_lease({"GPU-a": 0}, NoAnswer("gone", Silence.ENDED)), ((), 2))
        self.assertEqual(self.warnings, ["device memory is no longer checked between tests: gone"])

    def test_without_nvml(self):
        memory, found = MemoryReturn(self.loop), []
        memory.leased(("a",))
        memory.when_back(("a",), found.append)
        self.assertEqual((found, memory.is_waiting), ([()], False))

    def test_the_end_of_a_run_waits_for_nothing(self):
        memory, found = MemoryReturn(self.loop, FakeNvml({"GPU-a": 0}, {"GPU-a": GIB}), {"a": "GPU-a"}), []
        memory.leased(("a",))
        memory.when_back(("a",), found.append)
        self.assertTrue(memory.is_waiting)
        memory.give_up()
        self.assertEqual((found, memory.is_waiting), ([()], False))

    def test_the_last_of_several_units_on_a_device_counts(self):
        nvml = FakeNvml({"GPU-a": 0}, {"GPU-a": GIB})
        memory, found = MemoryReturn(self.loop, nvml, {"a": "GPU-a"}), []
        memory.leased(("a",))
        memory.leased(("a",))
        self.assertEqual(nvml.asked, 1)
        memory.when_back(("a",), found.append)
        self.assertEqual((found, nvml.asked), ([()], 1))
        memory.when_back(("a",), found.append)
        while memory.is_waiting:
            self.loop.step()
        self.assertEqual(len(found[1]), 1)

    def test_a_device_that_does_not_answer(self):
        lost = Usage(None, trouble="GPU is lost")
        self.assertEqual(why_held(Usage(GIB), lost), "did not answer (GPU is lost)")
        self.assertIsNone(why_held(lost, lost))
        self.assertIsNone(why_held(lost, Usage(GIB)))

    def test_processes_are_named(self):
        with mock.patch.object(system, "has_pids_of_host", lambda: True):
            self.assertRegex(describe_process(os.getpid()), rf"^pid {os.getpid()} \(.*python")
            self.assertEqual(describe_process(2**22 + 7), "pid 4194311 (not a process that can be seen from here)")

    def test_processes_of_the_host_are_not_looked_up_in_a_container(self):
        with mock.patch.object(system, "has_pids_of_host", lambda: False):
            self.assertEqual(describe_process(os.getpid()), f"pid {os.getpid()} of the host")

    def test_processes_of_a_run(self):
        processes = FileProcesses(Path.cwd(), WarmUp())
        with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as child:
            for has_pids, is_warm, expected in (
                (True, False, [True, True, False]),
                (False, False, [True] * 3),
                (True, True, [True] * 3),
            ):
                processes.is_warm = is_warm
                with mock.patch.object(system, "has_pids_of_host", lambda has_pids=has_pids: has_pids):
                    asked = [processes.may_be_ours(pid) for pid in (os.getpid(), child.pid, os.getppid())]
                self.assertEqual(asked, expected)
            child.stdin.close()

    def test_uuids_as_nvml_gives_them(self):
        known = ("GPU-8932f937-d72c-4106-c12f-20bd9faed9f6", "GPU-11111111-2222")
        for identities, name, expected in (
            ({"0": "8932f937-d72c-4106-c12f-20bd9faed9f6"}, "0", known[0]),
            ({}, "GPU-8932f937", known[0]),
            ({}, "MIG-aaaaaaaa-0000", None),
            ({}, "0", None),
            ({}, "GPU-", None),
        ):
            self.assertEqual(uuids_for(identities, [name], known).get(name), expected, (identities, name))


class OutcomeTest(unittest.TestCase):
    def test_the_last_result_says_it(self):
        first, last = (make_attempt(make_test(name), TestOutcome.PASSED) for name in ("test_a", "test_b"))
        held = [HeldDevice("0", "still had 1.0 GiB more")]
        changed = with_held([first, last], held)
        self.assertEqual([one.outcome for one in changed], [TestOutcome.PASSED, TestOutcome.LEAKED])
        self.assertEqual(changed[1].said, "device 0 still had 1.0 GiB more; it is not used again in this run")
        failed = make_attempt(make_test("test_c"), TestOutcome.CRASHED, "it crashed")
        (changed,) = with_held([failed], held)
        self.assertEqual(changed.outcome, TestOutcome.CRASHED)
        self.assertRegex(changed.said, "^it crashed\n\ndevice 0 still had")
        self.assertEqual(with_held([first], []), [first])
        self.assertEqual(with_held([], held), [])


TESTS = subject(__file__, "tests_on_devices.py")


@pytest.mark.slow
class QuarantineTest(unittest.TestCase):
    def test_the_run_goes_on_with_the_other_devices(self):
        project = Project()
        self.addCleanup(project.close)
        file = project.write(TESTS)
        inventory = Inventory(("0", "1"), fake=True)
        tests = sorted(project.preloaded_server.discover([file], 2).tests, key=lambda test: test.id)
        planned = plan(tests, inventory, lambda test: None)
        self.assertEqual([unit.devices for unit in planned.units], [1, 1, 2])
        recorder = EventRecorder()
        options = Options(jobs=1, timeout=60.0)
        # The unit with two devices starts last: otherwise it would be over before a device is held.
        leases = Leases(inventory.names, 1)
        queue = Queue(planned.units, leases, priority=lambda unit: unit.number)
        free = {"GPU-0": 0, "GPU-1": 0}
        taken = {"GPU-0": 2 * GIB, "GPU-1": 0}
        nvml = FakeNvml(free, free, taken)
        memory = MemoryReturn(
            project.preloaded_server.loop, nvml, {"0": "GPU-0", "1": "GPU-1"}, timeout=0.0, quarantine=leases.quarantine
        )
        site = LocalSite(options, project.preloaded_server, inventory)
        engine = Engine(site, options, inventory, leases, queue, recorder, memory=memory)
        summary = engine.run(planned)
        outcomes = {one.test.id.method: one.outcome for one in summary.finished}
        self.assertEqual(
            outcomes,
            {"test_first": TestOutcome.LEAKED, "test_other": TestOutcome.PASSED, "test_wide": TestOutcome.ERROR},
        )
        messages = {one.test.id.method: one.last.said for one in summary.finished}
        self.assertRegex(messages["test_first"], "^device 0 still had 2.0 GiB more")
        self.assertRegex(messages["test_wide"], "^it was not run: too few devices are left: device 0 still had")
        warned = [event.text for event in recorder.of(events.Warned)]
        self.assertEqual(len(warned), 1)
        self.assertRegex(warned[0], "device 0 .* is not used again in this run")
        self.assertEqual(list(summary.warnings), warned)
        self.assertEqual(leases.free_devices, 1)


class PeakTest(unittest.TestCase):
    """The most device memory of a test."""

    def test_the_sum_of_the_ranks_on_the_fullest_device(self):
        self.assertEqual(
            device_memory.highest([((0, 5, 10),), ((0, 6, 20), (1, 1, 25)), ()]), device_memory.DevicePeak(11, 30, 2)
        )
        self.assertIsNone(device_memory.highest([]))

    def test_what_ranks_have_said_belongs_to_one_test(self):
        account = launch.RankAccount(launch.RankEnding.PASSED, 0.0, 1.0, memory=((0, 5, 10),))
        device_memory.forget_memory()
        notes.note_memory({0: account.memory, 1: account.memory})
        self.assertEqual(device_memory.highest(notes.take_notes().memory), device_memory.DevicePeak(10, 20, 2))
        self.assertIsNone(device_memory.highest(notes.take_notes().memory))
        notes.note_memory({0: account.memory})
        device_memory.forget_memory()
        self.assertIsNone(device_memory.highest(notes.take_notes().memory))

    def test_in_words(self):
        attempt = make_attempt(
            make_test("test_x"), TestOutcome.PASSED, lease=Lease(("0",)), memory=DeviceMemory(GIB, 3 * GIB // 2, 2)
        )
        self.assertEqual(wording.memory(attempt), "1.5 GiB of device memory")


PEAKS = subject(__file__, "peaks_of_ranks.py")


@pytest.mark.slow
class PeakInReportsTest(unittest.TestCase):
    """Ranks that say how much memory they have had: here a made-up amount, on a GPU what torch says."""

    def test_ranks_say_it(self):
        project = Project()
        self.addCleanup(project.close)
        run = project.run(project.write(PEAKS))
        # Of each rank, and of the test's own process.
        expected = DeviceMemory(3 * 2**29, 3 * GIB, 3)
        for name in ("test_fresh", "test_one", "test_two"):
            self.assertEqual((run.outcomes[name], run[name].end.memory), ("passed", expected), run[name].said)


if __name__ == "__main__":
    unittest.main()

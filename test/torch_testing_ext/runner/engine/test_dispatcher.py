"""Tests how waiting units get leases, and how leases end: without processes."""

from torch_testing_ext._process.event_loop import EventLoop
from torch_testing_ext.common_utils import TestCase, run_tests
from torch_testing_ext.runner.engine.dispatcher import Dispatcher
from torch_testing_ext.runner.engine.memory_return import HeldDevice, MemoryReturn
from torch_testing_ext.runner.model import Test, TestId, Unit
from torch_testing_ext.runner.scheduling.leases import Leases
from torch_testing_ext.runner.scheduling.unit_queue import Queue


def unit(number, devices=0, file="test_x.py"):
    return Unit(number, (Test(TestId(file, "T", f"test_{number}"), devices=devices),))


class TestDispatcher(TestCase):
    def setUp(self):
        super().setUp()
        self.loop = EventLoop()
        self.addCleanup(self.loop.close)
        self.started = []

    def dispatcher(self, *units, devices=2, slots=1):
        self.leases = Leases(tuple(map(str, range(devices))), slots)
        self.queue = Queue(units, self.leases)
        self.memory = MemoryReturn(self.loop)
        made = Dispatcher(self.queue, self.leases, self.memory, self.loop)
        made.begin(units)
        return made

    def dispatch(self, dispatcher):
        self.started = []
        dispatcher.dispatch(lambda unit, lease: self.started.append((unit, lease)))
        return [unit.number for unit, _ in self.started]

    def test_units_start_as_leases_end(self):
        dispatcher = self.dispatcher(unit(0, 2), unit(1, 1), unit(2), unit(3))
        self.assertEqual(self.dispatch(dispatcher), [0, 2])
        leases = [lease for _, lease in self.started]
        self.assertEqual(self.dispatch(dispatcher), [])
        dispatcher.give_back(leases[0])
        self.assertEqual(self.dispatch(dispatcher), [1])
        dispatcher.give_back(leases[1])
        self.assertEqual(self.dispatch(dispatcher), [3])
        self.assertFalse(self.queue)

    def test_the_last_unit_of_a_file(self):
        first, other = unit(0), unit(1, file="test_y.py")
        dispatcher = self.dispatcher(first, other)
        dispatcher.add(first)
        self.assertEqual([dispatcher.end(one) for one in (first, other, first)], [False, True, True])

    def test_a_unit_that_is_added_has_a_new_number(self):
        dispatcher = self.dispatcher(unit(0), unit(7))
        dispatcher.add(unit(0))
        self.assertEqual(sorted(one.number for one in self.queue.clear()), [0, 7, 8])

    def test_a_device_that_is_held_is_not_leased_again(self):
        dispatcher = self.dispatcher(unit(0, 1), unit(1, 2), unit(2, 1))
        self.assertEqual(dispatcher.drop_hopeless()[0], ())
        self.memory.held = (HeldDevice("0", "is in use"),)
        self.leases.quarantine("0")
        hopeless, why = dispatcher.drop_hopeless()
        self.assertEqual([one.number for one in hopeless], [1])
        self.assertEqual(why, "too few devices are left: device 0 is in use")
        self.assertEqual(self.dispatch(dispatcher), [0])
        self.assertEqual(self.started[0][1].devices, ("1",))


if __name__ == "__main__":
    run_tests()

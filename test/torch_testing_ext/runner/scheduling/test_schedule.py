"""The schedule and the leases, without a process: as tables, and for random arrivals."""

import unittest

from kit.drawing import Drawer, seeds
from kit.invented import make_unit

from torch_testing_ext.runner.scheduling.leases import Leases
from torch_testing_ext.runner.scheduling.unit_queue import MOST_OVERTAKEN, Queue


def leases_of(devices, slots):
    return Leases(tuple(map(str, range(devices))), slots)


def make_queue(units, devices, slots, **more):
    """A queue for a machine of which all is free: the arguments of `take` say what is meant to be free."""
    return Queue(units, leases_of(devices, slots), **more)


def taken(queue, devices, slots=1):
    """The numbers of the units in the order in which they start, if each ends before the next starts."""
    numbers = []
    while len(queue):
        numbers.append(queue.take(devices, slots).number)
    return numbers


class OrderTest(unittest.TestCase):
    def test_longest_first(self):
        queue = make_queue(
            [make_unit(number, devices=1, seconds=seconds) for number, seconds in enumerate([2, 9, 5])], 1, 1
        )
        self.assertEqual(taken(queue, 1), [1, 2, 0])

    def test_widest_before_longest(self):
        units = [make_unit(0, 1, seconds=9), make_unit(1, 4, seconds=5), make_unit(2, 2, seconds=7)]
        filler = [make_unit(number, 1, seconds=8) for number in range(3, 9)]
        self.assertEqual(taken(make_queue([*units, *filler], 4, 1), 4)[:3], [1, 2, 0])

    def test_a_unit_as_long_as_all_others_goes_first(self):
        units = [make_unit(0, 4, seconds=1), make_unit(1, 1, seconds=100), make_unit(2, 2, seconds=2)]
        self.assertEqual(taken(make_queue(units, 4, 1), 4)[0], 1)

    def test_unknown_counts_as_typical(self):
        units = [make_unit(number, 1, seconds=seconds) for number, seconds in enumerate([1, 5, None, 6, 7])]
        self.assertEqual(taken(make_queue(units, 1, 1), 1), [4, 3, 2, 1, 0])

    def test_equal_units_keep_their_order(self):
        self.assertEqual(taken(make_queue([make_unit(number) for number in range(5)], 0, 1), 0), [0, 1, 2, 3, 4])

    def test_priority_goes_before_size(self):
        units = [make_unit(0, 4, seconds=9), make_unit(1, 1, seconds=100), make_unit(2, 2, seconds=2)]
        self.assertEqual(taken(make_queue(units, 4, 1, priority=lambda unit: -unit.number), 4), [2, 1, 0])

    def test_too_few_free_resources(self):
        queue = make_queue([make_unit(0, 2), make_unit(1, ranks=2)], 2, 2)
        self.assertIsNone(queue.take(1, 1))
        self.assertEqual(len(queue), 2)

    def test_small_units_fill_gaps(self):
        queue = make_queue([make_unit(0, 4), make_unit(1, 1)], 4, 1)
        self.assertEqual(queue.take(2, 0).number, 1)

    def test_cpu_and_devices_do_not_wait_for_each_other(self):
        queue = make_queue([make_unit(0, 4), make_unit(1, ranks=4)], 4, 4)
        self.assertEqual(queue.take(0, 4).number, 1)
        self.assertEqual(queue.take(4, 0).number, 0)

    def test_more_ranks_than_slots_take_them_all(self):
        leases = Leases((), 2)
        queue = Queue([make_unit(0, ranks=40)], leases)
        self.assertEqual(leases.take(queue.take(0, 2)).slots, (0, 1))

    def test_clear(self):
        queue = make_queue([make_unit(0, 1), make_unit(1)], 1, 1)
        self.assertEqual({unit.number for unit in queue.clear()}, {0, 1})
        self.assertEqual(len(queue), 0)
        self.assertIsNone(queue.take(1, 1))


class StarvationTest(unittest.TestCase):
    def test_large_in_a_stream_of_small(self):
        """One device is never free while small units keep arriving; finally the large one holds them back."""
        queue = make_queue([make_unit(0, 2)], 2, 1)
        for number in range(1, 100):
            queue.add(make_unit(number, 1))
            if queue.take(1, 1) is None:
                break
        self.assertEqual(number, MOST_OVERTAKEN * 2 + 1)
        self.assertEqual(queue.take(2, 1).number, 0)

    def test_small_in_a_stream_of_large(self):
        queue = make_queue([make_unit(0, 1)], 2, 1)
        started = []
        for number in range(1, 100):
            queue.add(make_unit(number, 2))
            started.append(queue.take(2, 1).number)
        self.assertEqual(started.index(0), MOST_OVERTAKEN * 2)


class LeasesTest(unittest.TestCase):
    def test_exactly_what_is_needed(self):
        leases = Leases(("0", "2", "5"), 6)
        self.assertEqual(leases.take(make_unit(0, 2)).devices, ("0", "2"))
        self.assertEqual(leases.take(make_unit(1, ranks=3)).slots, (0, 1, 2))
        self.assertEqual((leases.free_devices, leases.free_slots), (1, 1))

    def test_ranks_on_devices_leave_fewer_slots(self):
        leases = Leases(tuple("01234567"), 8)
        wide = leases.take(make_unit(0, 4, ranks=4))
        narrow = leases.take(make_unit(1, ranks=1))
        self.assertEqual(leases.free_slots, 3)
        other = leases.take(make_unit(2, 4, ranks=4))
        self.assertEqual(leases.free_slots, 0)
        leases.give_back(wide)
        leases.give_back(other)
        self.assertEqual(leases.free_slots, 7)
        leases.give_back(narrow)
        self.assertEqual(leases.free_slots, 8)

    def test_one_unit_on_the_cpu_runs_beside_ranks_on_devices(self):
        """Of any width: there may be ranks on devices until the end of the run."""
        leases = Leases(("0", "1"), 4)
        leases.take(make_unit(0, 2, ranks=8))
        queue = Queue([make_unit(1, ranks=1), make_unit(2, ranks=4), make_unit(3, ranks=3)], leases)
        started = []
        for _ in range(3):
            unit = queue.take(leases.free_devices, leases.free_slots)
            lease = leases.take(unit)
            started.append(unit.number)
            self.assertIsNone(queue.take(leases.free_devices, leases.free_slots))
            leases.give_back(lease)
        self.assertEqual(started, [2, 3, 1])

    def test_given_back(self):
        leases = Leases(("a", "b"), 1)
        first = leases.take(make_unit(0, 1))
        leases.take(make_unit(1, 1))
        leases.give_back(first)
        self.assertEqual(leases.take(make_unit(2, 1)).devices, ("a",))

    def test_not_twice(self):
        leases = Leases(("a",), 1)
        lease = leases.take(make_unit(0, 1))
        leases.give_back(lease)
        with self.assertRaisesRegex(AssertionError, "is not held"):
            leases.give_back(lease)

    def test_never_too_few(self):
        leases = Leases(("a", "b"), 1)
        leases.take(make_unit(0, 1))
        with self.assertRaisesRegex(AssertionError, "needs 2 of 1"):
            leases.take(make_unit(1, 2))

    def test_a_device_has_one_name(self):
        with self.assertRaisesRegex(AssertionError, "same name"):
            Leases(("0", "0"), 1)


def machine(draw):
    """A machine, the units that wait at first, and those that arrive while others run."""
    devices, slots = draw.whole(0, 8), draw.whole(1, 6)

    def needs(draw):
        seconds = draw.one_of([None, draw.number(0, 100)])
        on_devices = devices and draw.one_of([True, False])
        return (draw.whole(1, devices), draw.whole(1, 10), seconds) if on_devices else (0, draw.whole(1, 10), seconds)

    units = [make_unit(number, *need) for number, need in enumerate(draw.several(needs, 0, 30))]
    first = draw.whole(0, len(units))
    return devices, slots, units[:first], units[first:]


class ArrivalsTest(unittest.TestCase):
    def test_leases_never_overlap_and_all_units_run(self):
        for seed in seeds(100):
            with self.subTest(seed=seed):
                draw = Drawer(seed)
                self.check_leases(draw, *machine(draw))

    def check_leases(self, draw, devices, slots, waiting, arriving):
        names = tuple(f"device{number}" for number in range(devices))
        leases = Leases(names, slots)
        queue = Queue(waiting, leases)
        expected, started = {unit.number for unit in (*waiting, *arriving)}, []
        running = []
        while len(queue) or running or arriving:
            while (unit := queue.take(leases.free_devices, leases.free_slots)) is not None:
                lease = leases.take(unit)
                started.append(unit.number)
                running.append(lease)
                self.check(running, unit, lease, names, slots)
            if not running and not arriving:
                self.assertEqual(len(queue), 0, "nothing runs, and no waiting unit starts")
            elif arriving and (not running or draw.one_of([True, False])):
                queue.add(arriving.pop())
            else:
                leases.give_back(running.pop(draw.whole(0, len(running) - 1)))
        self.assertEqual(sorted(started), sorted(expected))
        self.assertEqual((leases.free_devices, leases.free_slots), (devices, slots))

    def check(self, running, unit, lease, names, slots):
        self.assertEqual(len(lease.devices), unit.devices)
        self.assertEqual(len(lease.slots), 0 if unit.devices else min(unit.processes, slots))
        for resource, known in (("devices", names), ("slots", range(slots))):
            held = [one for other in running for one in getattr(other, resource)]
            self.assertEqual(len(held), len(set(held)), f"two leases share {resource}")
            self.assertLessEqual(set(held), set(known))

    def test_no_unit_starves(self):
        """A unit starts after the units before it and a bounded number of later arrivals."""
        for seed in seeds(100):
            with self.subTest(seed=seed):
                self.check_that_one_starts(Drawer(seed))

    def check_that_one_starts(self, draw):
        devices = draw.whole(1, 4)
        before = draw.several(lambda draw: draw.whole(1, devices), 0, 6)
        victim = make_unit(-1, draw.whole(1, devices), seconds=draw.number(0, 10))
        leases, running = leases_of(devices, 1), []
        queue = Queue([*(make_unit(-2 - n, width) for n, width in enumerate(before)), victim], leases)
        most = MOST_OVERTAKEN * devices
        bound = (len(before) + most + 1) * (most + 1)  # units that may start before it, each overtaken as often as it
        for number in range(bound + 1):
            while (unit := queue.take(leases.free_devices, 1)) is None:
                leases.give_back(running.pop(draw.whole(0, len(running) - 1)))
            if unit is victim:
                return
            running.append(leases.take(unit))
            queue.add(make_unit(number, draw.whole(1, devices), seconds=draw.number(0, 1000)))
        self.fail(f"{bound} units started before it")


if __name__ == "__main__":
    unittest.main()

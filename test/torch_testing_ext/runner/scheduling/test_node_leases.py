"""Leases on several nodes, and the queue for them: no process, no clock."""

import unittest

from kit.drawing import Drawer, seeds
from kit.invented import make_unit

from torch_testing_ext.runner.scheduling.forecasts import forecast
from torch_testing_ext.runner.scheduling.node_leases import NodeLeases
from torch_testing_ext.runner.scheduling.unit_queue import MOST_OVERTAKEN, Queue


def make(units, *nodes):
    """Leases on nodes of (devices, slots), and a queue that knows them."""
    leases = NodeLeases()
    for number, (devices, slots) in enumerate(nodes):
        leases.add(f"n{number}", tuple(map(str, range(devices))), slots)
    return leases, Queue(units, leases)


def take(leases, queue):
    unit = queue.take(leases.free_devices, leases.free_slots)
    return (None, None) if unit is None else (unit, leases.take(unit))


class NodeLeasesTest(unittest.TestCase):
    def test_best_fit(self):
        leases, queue = make([make_unit(0, 2), make_unit(1, 4)], (4, 1), (2, 1))
        self.assertEqual(take(leases, queue)[1].node, "n0")  # the widest first
        self.assertEqual(take(leases, queue)[1].node, "n1")

    def test_a_node_that_has_the_file_open(self):
        leases, _ = make([], (0, 2), (0, 2))
        first = leases.take(make_unit(0))
        leases.give_back(first)
        self.assertEqual({leases.take(make_unit(1)).node, first.node}, {first.node})

    def test_a_node_is_lost(self):
        leases, queue = make([make_unit(number, 2) for number in range(2)], (2, 1), (2, 1))
        _, first = take(leases, queue)
        _, second = take(leases, queue)
        self.assertNotEqual(first.node, second.node)
        leases.drop(first.node)
        leases.give_back(first)
        self.assertEqual(leases.free_devices, 0)
        leases.give_back(second)
        self.assertEqual(leases.free_devices, 2)
        self.assertEqual(take(leases, queue), (None, None))

    def test_a_draining_node_gets_nothing(self):
        leases, queue = make([make_unit(number) for number in range(2)], (0, 1), (0, 1))
        _, first = take(leases, queue)
        leases.drain("n1" if first.node == "n0" else "n0")
        self.assertEqual(take(leases, queue), (None, None))
        leases.give_back(first)
        self.assertEqual(take(leases, queue)[1].node, first.node)

    def test_a_node_joins(self):
        leases, queue = make([make_unit(0, 1)], (1, 1))
        queue.add(make_unit(1, 1))
        take(leases, queue)
        self.assertEqual(take(leases, queue), (None, None))
        leases.add("new", ("0", "1"), 1)
        self.assertEqual(take(leases, queue)[1].node, "new")

    def test_a_unit_with_more_ranks_than_slots_are_left(self):
        """It takes all slots of a node, however many those are."""
        leases, queue = make([make_unit(0, ranks=8)], (0, 8), (0, 2))
        leases.drop("n0")
        self.assertEqual(len(take(leases, queue)[1].slots), 2)

    def test_a_starving_unit_keeps_one_node(self):
        """A wide unit among a stream of narrow ones: the other node goes on meanwhile."""
        leases, queue = make([make_unit(0, 2)], (2, 1), (2, 1))
        held = [leases.take(make_unit(number, 1)) for number in (100, 101, 102, 103)]
        started, reserved = [], False
        for number in range(1, 60):
            queue.add(make_unit(number, 1))
            leases.give_back(held.pop(0))
            unit, lease = take(leases, queue)
            if unit is None:
                reserved = True  # the free device is kept
                continue
            started.append(unit.number)
            if unit.number == 0:
                break
            held.append(lease)
        self.assertTrue(reserved)
        self.assertEqual(started[-1], 0)
        self.assertLessEqual(len(started), MOST_OVERTAKEN * 4 + 4)

    def test_one_that_fits_nowhere_any_more_holds_up_no_other(self):
        units = [make_unit(0, 3), *(make_unit(number, 1) for number in range(1, 40))]
        leases, queue = make(units, (3, 1), (2, 1))
        leases.drop("n0")
        started = []
        while (unit := queue.take(leases.free_devices, leases.free_slots)) is not None:
            started.append(unit.number)
            leases.give_back(leases.take(unit))
        self.assertEqual(sorted(started), list(range(1, 40)))
        self.assertEqual(len(queue), 1)
        leases.add("new", ("0", "1", "2"), 1)
        self.assertEqual(take(leases, queue)[0].number, 0)

    def test_a_lease_of_a_node_that_is_back(self):
        """It was another node of that name: the lease is gone already."""
        leases, queue = make([make_unit(0, 2)], (2, 1))
        _, lease = take(leases, queue)
        leases.drop("n0")
        leases.add("n0", ("0", "1"), 1)
        again = leases.take(make_unit(1, 2))
        leases.give_back(lease)
        self.assertEqual(leases.free_devices, 0)
        leases.give_back(again)
        self.assertEqual(leases.free_devices, 2)

    def test_every_unit_starts_once(self):
        for seed in seeds(200):
            with self.subTest(seed=seed):
                draw = Drawer(seed)
                units = draw.several(lambda draw: (draw.whole(0, 4), draw.whole(1, 6), draw.number(0.1, 9.0)), 1, 30)
                nodes = draw.several(lambda draw: (draw.whole(0, 4), draw.whole(1, 4)), 1, 4)
                self.check_starts(units, nodes)

    def check_starts(self, units, nodes):
        most = max(devices for devices, _ in nodes)
        made = [make_unit(n, min(devices, most), ranks, s) for n, (devices, ranks, s) in enumerate(units)]
        leases, queue = make(made, *nodes)
        starts = list(forecast(queue, leases, lambda unit: unit.seconds))
        self.assertEqual(sorted(start.unit.number for start in starts), list(range(len(units))))
        for one in starts:
            beside = [
                other
                for other in starts
                if other.began <= one.began < other.ended and other.lease.node == one.lease.node
            ]
            used = [device for other in beside for device in other.lease.devices]
            slots = [slot for other in beside for slot in other.lease.slots]
            self.assertEqual((len(used), len(slots)), (len(set(used)), len(set(slots))))


if __name__ == "__main__":
    unittest.main()

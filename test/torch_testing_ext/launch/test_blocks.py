"""Which ranks of a job are on which node, and what they are told."""

import unittest

from hypothesis import given, strategies as st

from torch_testing_ext.common_utils import run_tests
from torch_testing_ext.launch.blocks import Room, blocks_of, split
from torch_testing_ext.launch.rendezvous import interface_to


class SplitTest(unittest.TestCase):
    def test_node_by_node(self):
        for world_size, rooms, lengths in (
            (4, (2, 2), [2, 2]),
            (3, (2, 2), [2, 1]),
            (2, (2, 2), [2]),
            (1, (1, 1), [1]),
            (5, (1, 3, 4), [1, 3, 1]),
            (8, (2, 2), [4, 4]),
            (7, (1, 2), [2, 5]),
        ):
            self.assertEqual([len(one) for one in split(world_size, rooms)], lengths, (world_size, rooms))

    @given(st.integers(1, 64), st.lists(st.integers(1, 9), min_size=1, max_size=6))
    def test_every_rank_is_in_one_block(self, world_size, rooms):
        ranges = split(world_size, rooms)
        self.assertEqual([rank for one in ranges for rank in one], list(range(world_size)))
        self.assertTrue(all(ranges))


class BlocksTest(unittest.TestCase):
    rooms = (Room("a", 2, "10.0.0.1"), Room("b", 3, "10.0.0.2"))

    def test_what_torchrun_says(self):
        first, second = blocks_of(5, self.rooms, 1234)
        self.assertEqual((first.ranks, second.ranks), (range(2), range(2, 5)))
        self.assertEqual((first.peer, second.peer), ("10.0.0.2", "10.0.0.1"))
        self.assertEqual(
            second.environ_of(3, 5),
            {
                "RANK": "3",
                "ROLE_RANK": "3",
                "LOCAL_RANK": "1",
                "GROUP_RANK": "1",
                "WORLD_SIZE": "5",
                "ROLE_WORLD_SIZE": "5",
                "LOCAL_WORLD_SIZE": "3",
                "GROUP_WORLD_SIZE": "2",
                "MASTER_ADDR": "10.0.0.1",
                "MASTER_PORT": "1234",
                "TORCHELASTIC_USE_AGENT_STORE": "True",
            },
        )

    def test_none_if_the_first_node_has_room(self):
        self.assertEqual(blocks_of(2, self.rooms), ())
        self.assertEqual(blocks_of(1, self.rooms[:1]), ())

    def test_the_interface_of_a_route(self):
        self.assertEqual(interface_to("127.0.0.3"), "lo")
        self.assertIsNone(interface_to("no address"))


if __name__ == "__main__":
    run_tests()

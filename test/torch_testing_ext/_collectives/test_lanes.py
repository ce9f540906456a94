"""Who waits for whom in the lanes of a test: for the last rank, or for one that never came."""

import unittest

from torch_testing_ext._collectives.lanes_of_ranks import RankLane, TimedCall, meetings


def lanes(*calls_of_ranks, members=(), group="default"):
    """Lanes of ranks: for each of their calls, its name, when it began, and whether it is over."""
    everyone = members or tuple(range(len(calls_of_ranks)))
    made = []
    for rank, calls in enumerate(calls_of_ranks):
        timed = [
            TimedCall(name, group, place, at, is_over, "", everyone)
            for place, (name, at, is_over) in enumerate(calls, 1)
        ]
        made.append(RankLane(rank, 0.0, 0.0, 9.0, "stopped", tuple(timed)))
    return made


class MeetingsTest(unittest.TestCase):
    def last(self, *calls_of_ranks, **more):
        """For each collective: its first rank, the rank for which it waits, and when that came."""
        return [(meeting.calls[0][0], *meeting.last) for meeting in meetings(lanes(*calls_of_ranks, **more))]

    def test_the_last_one_to_come(self):
        self.assertEqual(self.last([("a", 1, True)], [("a", 3, True)], [("a", 2, True)]), [(0, 1, 3)])

    def test_a_rank_that_never_came(self):
        came = [("a", 1, True), ("b", 2, False)]
        later = [("a", 1.5, True), ("b", 3, False)]
        self.assertEqual(self.last(came, later, [("a", 1.2, True)], []), [(0, 1, 1.5), (0, 2, None)])
        # One rank alone waits.
        self.assertEqual(self.last([("a", 1, False)], []), [(0, 1, None)])
        # A rank that is not in the group is not missed.
        self.assertEqual(self.last([("a", 1, False)], [("a", 2, False)], [], members=(0, 1)), [(0, 1, 2)])

    def test_a_rank_that_calls_another_operation(self):
        self.assertEqual(self.last([("a", 1, False)], [("b", 1, False)], [("a", 2, False)]), [(0, 1, None)])

    def test_nobody_waits(self):
        self.assertEqual(self.last([("a", 1, True)], []), [])


if __name__ == "__main__":
    unittest.main()

"""The rules of whole worlds, on logs that are written here: classes, groups, progress, waits of the host."""

import contextlib
import inspect
import json
import tempfile
import unittest
from pathlib import Path
from unittest import mock

from torch_testing_ext._collectives.findings import mismatches
from torch_testing_ext._collectives.findings.finding import FindingKind
from torch_testing_ext._collectives.records.issued_calls import GroupRecord
from torch_testing_ext._collectives.records.rank_facts import bytes_of
from torch_testing_ext._collectives.sanitizer.issued_call import Issued
from torch_testing_ext._collectives.sanitizer.sanitizer_log import ALL, LogReader, LogWriter, text_of
from torch_testing_ext._collectives.worlds import world_progress
from torch_testing_ext._collectives.worlds.world_progress import Progress, judge
from torch_testing_ext._collectives.worlds.world_records import WorldRecords
from torch_testing_ext._collectives.worlds.world_traffic import traffic, view_of
from torch_testing_ext.common_utils import run_tests

FLOATS = ((4,), "float32")


class Rank:
    """Writes the log of one rank of a world: its groups are made first, each call has a line of its own."""

    def __init__(self, folder, number, groups):
        path = Path(folder, str(number))
        self.number, self.reader, self.writer, self.line = number, LogReader(path), LogWriter(path), 0
        self.groups = [name for name, members in groups if number in members]
        for name, members in groups:
            if number in members:
                group = GroupRecord(name, "", tuple(members), members.index(number), "w")
                self.writer.add_group(group, self.site())

    def site(self):
        self.line += 1
        return self.writer.text(json.dumps(["test_x.py", self.line, "test"]))

    def issue(self, kind="all_reduce", group=0, blocks=True, **fields):
        call = Issued(kind, **{"inputs": (FLOATS,), "outputs": (FLOATS,), **fields}, blocks=blocks).to_call()
        return self.writer.issue(group, self.writer.text(text_of(call)), None, self.site())

    def wait(self, number=ALL):
        self.writer.wait(number, self.site())


class WorldCase(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = folder.name

    def ranks(self, count, *groups):
        groups = groups or (("g", range(count)),)
        return [
            Rank(self.folder, number, [(name, list(members)) for name, members in groups]) for number in range(count)
        ]

    def judged(self, ranks, buffered=False):
        world = WorldRecords()
        # Ranks end in any order.
        for rank in reversed(ranks):
            world.add(rank.number, rank.reader)
        world.complete()
        self.world, self.progress = world, Progress(world, buffered)
        return judge(world, self.progress)


class WorldRulesTest(WorldCase):
    def test_ranks_of_a_class_share_their_calls(self):
        ranks = self.ranks(4, ("a", (0, 1)), ("b", (2, 3)))
        for rank in ranks:
            rank.issue(op="sum" if rank.number < 2 else "max")
            rank.issue(op="sum")
        self.assertIsNone(self.judged(ranks))
        self.assertEqual([alike.ranks for alike in self.world.classes], [[0, 1], [2, 3]])
        (calls,), (others,) = (record.calls.values() for record in self.world.records[:2])
        self.assertIs(calls, others)
        self.assertEqual(
            [str(alike) for alike in self.world.classes], ["ranks 0, 1 alike: 2 calls", "ranks 2, 3 alike: 2 calls"]
        )
        self.assertEqual([bytes_of(call) for call in calls], [16, 16])
        self.assertEqual(self.progress.chain, 2)

    def test_a_group_that_a_member_has_not_made(self):
        ranks = [*self.ranks(2), Rank(self.folder, 2, [])]
        ranks[0] = Rank(self.folder, 0, [("g", [0, 1, 2])])
        ranks[1] = Rank(self.folder, 1, [("g", [0, 1, 2])])
        finding = self.judged(ranks)
        self.assertEqual(finding.sentence, "ranks 0, 1 make group g of ranks 0-2, which rank 2 has not made")
        self.assertEqual(str(finding.lines[0]), "rank 0: makes group g of ranks 0-2   test_x.py:1 in test")

    def test_groups_of_one_name_without_a_common_member(self):
        ranks = [
            Rank(self.folder, number, [("g", [number - number % 2, number - number % 2 + 1])]) for number in range(4)
        ]
        for rank in ranks:
            rank.issue()
        self.assertIsNone(self.judged(ranks))

    def test_a_receive_from_any_rank(self):
        for senders in ((1, 2), (1,)):
            ranks = self.ranks(3)
            for number in senders:
                ranks[number].issue("send", peer=0)
            for _ in range(2):
                ranks[0].issue("recv")
            finding = self.judged(ranks)
            if len(senders) == 2:
                self.assertIsNone(finding)
            else:
                self.assertEqual(finding.kind, FindingKind.ABANDONED)
                self.assertIn("rank 0 is waiting in recv #2 from any rank", finding.sentence)

    def test_the_host_waits(self):
        """Rank 1 waits for the second group before it comes to the first, in which rank 0 waits."""
        both = (("a", (0, 1)), ("b", (0, 1)))
        for waits, is_stuck in (((None, None), False), ((0, ALL), True), ((ALL, 0), True), ((0, None), False)):
            ranks = self.ranks(2, *both)
            for rank, wait in zip(ranks, waits, strict=True):
                number = rank.issue(group=rank.number, blocks=False)
                if wait is not None:
                    rank.wait(ALL if wait == ALL else number)
                rank.issue(group=1 - rank.number, blocks=False)
            finding = self.judged(ranks)
            self.assertEqual(finding is not None, is_stuck, waits)
            if finding is not None:
                sentence = "rank 0 waits in group a (all_reduce #1, line 4) for rank 1, which waits in group b"
                self.assertIn(sentence, finding.sentence)
                line = "rank 0: waiting for rank 1 in all_reduce #1 of group a, issued at line 3   test_x.py:4 in test"
                self.assertEqual(str(finding.lines[0]), line)

    def test_sends(self):
        for buffered in (False, True):
            ranks = self.ranks(2)
            for rank in ranks:
                rank.issue("send", peer=1 - rank.number)
                rank.issue("recv", peer=1 - rank.number)
            self.assertEqual(self.judged(ranks, buffered) is None, buffered)

    def test_what_nobody_comes_to_is_not_compared(self):
        """All wait for each other before rank 1 would issue another second call."""
        ranks = self.ranks(2, ("a", (0, 1)), ("b", (0, 1)))
        for rank in ranks:
            rank.issue(group=rank.number)
            rank.issue(group=1 - rank.number, op="max" if rank.number else "sum")
        finding = self.judged(ranks)
        self.assertEqual(finding.kind, FindingKind.DEADLOCK)
        self.assertIn("rank 0 waits in group a (all_reduce #1, line 3) for rank 1", finding.sentence)

    def test_two_messages_without_a_partner_are_two(self):
        ranks = self.ranks(3)
        ranks[0].issue("recv", peer=1)
        ranks[2].issue("recv", peer=1)
        finding = self.judged(ranks)
        self.assertEqual(finding.sentence, "rank 1 left without sending; rank 0 is waiting in recv #1 from rank 1")

    def test_a_log_that_is_full(self):
        (rank,) = self.ranks(1)
        rank.writer = LogWriter(Path(self.folder, "0"), most=2)
        for _ in range(3):
            rank.issue()
        with self.assertRaisesRegex(
            ValueError, "rank 0 has issued more calls, or made more groups of many ranks, than a log has room for"
        ):
            self.judged([rank])

    def traffic_of(self, ranks, block=1):
        self.judged(ranks)
        return traffic(self.world, block)

    def test_traffic_of_messages(self):
        ranks = self.ranks(3)
        ranks[0].issue("send", peer=2)
        ranks[2].issue("recv", peer=0)
        self.assertEqual(self.traffic_of(ranks), [[0, 0, 16], [0, 0, 0], [0, 0, 0]])

    def test_traffic_of_collectives(self):
        """Each counts as the least that a rank must send; nobody sends to itself."""
        none, each = [0, 0, 0, 0], [16, 16, 16, 16]
        rooted = [0, 16, 16, 16]
        for kind, first, others in (
            ("all_reduce", [8, 8, 8, 8], [8, 8, 8, 8]),
            ("all_gather", each, each),
            ("reduce_scatter_tensor", [4, 4, 4, 4], [4, 4, 4, 4]),
            ("broadcast", rooted, none),
            ("scatter", [0, 4, 4, 4], none),
            ("reduce", none, [16, 0, 0, 0]),
            ("gather", none, [16, 0, 0, 0]),
            ("barrier", none, none),
        ):
            with self.subTest(kind):
                ranks = self.ranks(4)
                is_rooted = kind in ("broadcast", "scatter", "reduce", "gather")
                for rank in ranks:
                    tensors = {"inputs": (), "outputs": ()} if kind == "barrier" else {}
                    rank.issue(kind, root=0 if is_rooted else None, **tensors)
                expected = [list(first if number == 0 else others) for number in range(4)]
                for number in range(4):
                    expected[number][number] = 0
                self.assertEqual(self.traffic_of(ranks), expected)

    def test_traffic_with_splits(self):
        ranks = self.ranks(2)
        ranks[0].issue("all_to_all_single", size=2, splits=((1, 2), (1, 3)))
        ranks[1].issue("all_to_all_single", size=2, splits=((3, 1), (2, 2)))
        self.assertEqual(self.traffic_of(ranks), [[0, 12], [8, 0]])

    def test_traffic_of_blocks_of_ranks(self):
        ranks = self.ranks(4, ("g", (0, 1, 2, 3)), ("h", (0, 3)))
        for rank in ranks:
            rank.issue("all_gather")
        for rank in (ranks[0], ranks[3]):
            rank.issue("all_gather", group=1)
        self.assertEqual(self.traffic_of(ranks, 2), [[32, 80], [80, 32]])
        view = view_of(self.world, self.progress.chain, (), with_calls=True)
        self.assertEqual((view.size, view.block, sum(map(sum, view.traffic))), (4, 1, 224))
        self.assertEqual([(alike.ranks, alike.count) for alike in view.classes], [((0, 3), 2), ((1, 2), 1)])
        self.assertEqual([call.group for call in view.classes[0].calls], ["group g", "group h"])

    def test_a_large_world_has_a_small_matrix(self):
        ranks = self.ranks(70)
        for rank in ranks:
            rank.issue("all_gather")
        self.judged(ranks)
        view = view_of(self.world, self.progress.chain, (), with_calls=False)
        self.assertEqual((view.block, len(view.traffic), view.block_of(17)), (4, 18, range(68, 70)))
        self.assertEqual(view.traffic[0][0], 4 * 3 * 16)
        self.assertEqual(view.traffic[0][17], 4 * 2 * 16)
        self.assertEqual(view.classes[0].calls, ())

    def test_ranks_that_were_cut(self):
        """They may have gone on in reality; what others did, or wait for in a circle, counts."""
        ranks = self.ranks(2)
        ranks[0].issue()
        self.assertIsNotNone(self.judged(ranks))
        self.assertIsNone(judge(self.world, self.progress, is_cut=True))
        ranks = self.ranks(2)
        for rank in ranks:
            rank.issue("send", peer=1 - rank.number)
            rank.issue("recv", peer=1 - rank.number)
        self.judged(ranks)
        self.assertIs(judge(self.world, self.progress, is_cut=True).kind, FindingKind.DEADLOCK)
        ranks = self.ranks(2)
        ranks[0].issue(op="sum")
        ranks[1].issue(op="max")
        self.judged(ranks)
        self.assertIs(judge(self.world, self.progress, is_cut=True).kind, FindingKind.MISMATCH)


class BrokenRulesTest(WorldCase):
    """Each rule alone finds a fault: without it, the fault is missed, or told as another one."""

    @contextlib.contextmanager
    def without(self, rule):
        """Leave out a rule of `judge`, or of what it calls."""
        nothing = {
            "first_group_difference": (world_progress, lambda world: None),
            "first_mismatch": (world_progress, lambda records: None),
            "first_unmatched": (world_progress, lambda records: None),
            "reached": (Progress, lambda progress: self.world.records),
            "finding": (Progress, lambda progress: None),
            "_wrong_exchange": (mismatches, lambda *_: None),
            "pairs_of": (mismatches, lambda records: []),
            "_is_over": (Progress, self.is_over),
        }
        owner, instead = nothing[rule]
        with mock.patch.object(owner, rule, instead):
            yield

    @staticmethod
    def is_over(progress, rank, order, wait, known=Progress._is_over):
        return wait is not None or known(progress, rank, order, wait)

    def faults(self):
        """By rule: ranks with a fault that only it finds."""
        both = (("a", (0, 1)), ("b", (0, 1)))
        for field, values in (
            ("op", ("sum", "max")),
            ("root", (0, 1)),
            ("inputs", ((FLOATS,), (((3,), "float32"),))),
            ("inputs", ((FLOATS,), (((4,), "float64"),))),
        ):
            ranks = self.ranks(2)
            for rank in ranks:
                rank.issue("reduce", **{field: values[rank.number]})
            yield "first_mismatch", ranks
        ranks = self.ranks(2)
        for rank in ranks:
            rank.issue("all_reduce" if rank.number else "broadcast")
        yield "first_mismatch", ranks
        yield "first_group_difference", [Rank(self.folder, 0, [("g", [0, 1])]), Rank(self.folder, 1, [])]
        ranks = self.ranks(2)
        for rank in ranks:
            rank.issue("all_to_all_single", splits=((2, 2), (2, 2 - rank.number)))
        yield "_wrong_exchange", ranks
        ranks = self.ranks(2)
        ranks[0].issue("send", peer=1)
        ranks[1].issue("recv", peer=0, inputs=(((5,), "float32"),), outputs=(((5,), "float32"),))
        yield "pairs_of", ranks
        ranks = self.ranks(2)
        ranks[0].issue("send", peer=1, blocks=False)
        yield "first_unmatched", ranks
        ranks = self.ranks(2, *both)
        for rank in ranks:
            for group in (rank.number, 1 - rank.number):
                rank.issue(group=group)
        yield "finding", ranks
        ranks = self.ranks(2, *both)
        for rank in ranks:
            rank.issue(group=rank.number, blocks=False)
            rank.wait()
            rank.issue(group=1 - rank.number)
        yield "_is_over", ranks
        ranks = self.ranks(2, *both)
        for rank in ranks:
            rank.issue(group=rank.number)
            rank.issue(group=1 - rank.number, op="max" if rank.number else "sum")
        yield "reached", ranks

    def kind(self, ranks):
        finding = self.judged(ranks)
        return finding and finding.kind

    def test_each_is_needed(self):
        kinds = [self.kind(ranks) for _, ranks in self.faults()]
        self.assertNotIn(None, kinds)
        broken = set()
        for kind, (rule, ranks) in zip(kinds, self.faults(), strict=True):
            with self.without(rule):
                self.assertIsNot(self.kind(ranks), kind, rule)
            broken.add(rule)
        of_both = {**vars(Progress), **vars(world_progress)}
        rules = {name for name in judge.__code__.co_names if inspect.isfunction(of_both.get(name))}
        self.assertEqual(rules - broken, set())


if __name__ == "__main__":
    run_tests()

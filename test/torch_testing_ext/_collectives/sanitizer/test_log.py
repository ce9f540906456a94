"""The log of a rank: what is written is read, headers tell agreement, and a log that is full says so."""

import functools
import json
import tempfile
import threading
import unittest
from pathlib import Path

from torch_testing_ext._collectives.findings.abandoned_calls import first_abandoned
from torch_testing_ext._collectives.findings.deadlocks import deadlocked, waiting_calls
from torch_testing_ext._collectives.findings.mismatches import first_mismatch
from torch_testing_ext._collectives.findings.opposite_orders import first_inversion
from torch_testing_ext._collectives.findings.unbuffered_sends import first_unbuffered
from torch_testing_ext._collectives.findings.uneven_calls import first_unmatched
from torch_testing_ext._collectives.records.issued_calls import GroupRecord
from torch_testing_ext._collectives.sanitizer import sanitizer_log
from torch_testing_ext._collectives.sanitizer.issued_call import Issued
from torch_testing_ext._collectives.sanitizer.log_headers import is_quiet, show_mismatch, uses_groups
from torch_testing_ext._collectives.sanitizer.sanitizer_log import LogReader, LogWriter
from torch_testing_ext.common_utils import run_tests

FLOATS = ((4,), "float32")


class Rank:
    """A rank that writes a log, in this process."""

    def __init__(self, folder, number, groups, most=sanitizer_log.MOST_RECORDS):
        self.number = number
        self.writer = LogWriter(Path(folder, f"rank{number}"), most)
        self.reader = LogReader(Path(folder, f"rank{number}"))
        self.line = 0
        for name, members in groups.items():
            if number in members:
                self.writer.add_group(GroupRecord(name, "", tuple(members), members.index(number), "w"))
        self.groups = [name for name, members in groups.items() if number in members]

    def issue(self, kind, group="g", **fields):
        issued = Issued(kind, **{"inputs": (FLOATS,), **fields})
        agreement = None if issued.is_compared_in_pairs else json.dumps(issued.agreement()).encode()
        self.line += 1
        site = self.writer.text(json.dumps(["test_x.py", self.line, "test"]))
        return self.writer.issue(
            self.groups.index(group), self.writer.text(sanitizer_log.text_of(issued.to_call())), agreement, site
        )

    @property
    def header(self):
        return self.reader.header()

    @property
    def record(self):
        return self.reader.read().record(self.number)


class LogTest(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = folder.name

    def ranks(self, count=2, most=sanitizer_log.MOST_RECORDS, **groups):
        ranks = [Rank(self.folder, number, groups or {"g": list(range(count))}, most) for number in range(count)]
        for rank in ranks:
            self.addCleanup(rank.reader.remove)
        return ranks

    def test_what_is_written_is_read(self):
        (rank,) = self.ranks(1)
        rank.issue("all_reduce", op="sum")
        rank.issue("broadcast", root=0)
        content = rank.reader.read()
        self.assertEqual([issued.call.kind for issued in content.issued], ["all_reduce", "broadcast"])
        self.assertEqual(
            [issued.call.site for issued in content.issued], [("test_x.py", 1, "test"), ("test_x.py", 2, "test")]
        )
        self.assertEqual(content.groups, [GroupRecord("g", "", (0,), 0, "w")])
        self.assertTrue(content.is_whole)

    def test_a_log_that_is_not_there(self):
        reader = LogReader(Path(self.folder, "none"))
        self.assertEqual(reader.header(), b"")
        self.assertIsNone(reader.read())

    def test_a_call_that_raised_was_not_issued(self):
        (rank,) = self.ranks(1)
        number = rank.issue("all_reduce")
        rank.writer.raised(number)
        rank.issue("barrier", inputs=())
        self.assertEqual([issued.call.kind for issued in rank.reader.read().issued], ["barrier"])
        self.assertFalse(is_quiet([rank.header]))

    def test_a_latest_call_that_raised_tells_what_a_rank_wanted(self):
        """Its peer has ended; but it does not wait."""
        ranks = self.ranks()
        ranks[1].writer.raised(ranks[1].issue("recv", inputs=(), outputs=(FLOATS,), peer=0))
        records = [rank.record for rank in ranks]
        self.assertEqual(waiting_calls(records), {})
        self.assertIsNone(first_unmatched(records))
        found = first_abandoned(records, {0: "passed"}, [1])
        self.assertIn("rank 0 left without sending; rank 1 is waiting in recv #1 from rank 0", found.sentence)

    def test_calls_before_an_error_of_torch_count_as_raised(self):
        (rank,) = self.ranks(1)
        rank.issue("all_reduce")
        rank.writer.error_now()
        self.assertTrue(rank.reader.read().issued[0].call.raised)

    def test_calls_long_before_an_error_do_not(self):
        (rank,) = self.ranks(1)
        for _ in range(4):
            rank.issue("all_reduce", op="sum")
        rank.writer.error_now()
        rank.issue("all_reduce", op="sum")
        self.assertEqual([issued.call.raised for issued in rank.reader.read().issued], [False, True, True, True, False])
        for _ in range(4):
            rank.issue("all_reduce", op="sum")
        rank.writer.error_now()
        raised = [issued.call.raised for issued in rank.reader.read().issued]
        self.assertEqual(raised, [False, True, True, True, False, False, True, True, True])
        self.assertTrue(rank.record.is_whole)

    def test_headers_of_ranks_that_agree(self):
        ranks = self.ranks()
        for rank in ranks:
            rank.issue("all_reduce", op="sum")
        self.assertTrue(is_quiet([rank.header for rank in ranks]))
        ranks[0].issue("all_reduce", op="sum")
        self.assertFalse(is_quiet([rank.header for rank in ranks]))
        self.assertFalse(show_mismatch([rank.header for rank in ranks]))
        ranks[1].issue("all_reduce", op="max")
        self.assertTrue(show_mismatch([rank.header for rank in ranks]))

    def test_headers_of_ranks_that_send_are_not_quiet(self):
        ranks = self.ranks()
        ranks[0].issue("send", peer=1)
        ranks[1].issue("recv", inputs=(), outputs=(FLOATS,), peer=0)
        self.assertFalse(is_quiet([rank.header for rank in ranks]))
        self.assertFalse(show_mismatch([rank.header for rank in ranks]))

    def test_a_full_log_says_so(self):
        (rank,) = self.ranks(1, most=3)
        for _ in range(3):
            rank.issue("all_reduce")
        self.assertFalse(rank.reader.read().is_whole)
        self.assertFalse(is_quiet([rank.header]))

    def test_texts_without_end(self):
        (rank,) = self.ranks(1)
        for number in range(12):
            rank.writer.text(f"{number}" * 100_000)
        rank.issue("all_reduce")
        self.assertFalse(rank.reader.read().is_whole)

    def test_a_mismatch_shows_all_that_differs(self):
        ranks = self.ranks()
        ranks[0].issue("reduce", op="sum", root=0)
        ranks[1].issue("reduce", op="sum", root=1)
        found = first_mismatch([rank.record for rank in ranks])
        self.assertIn(
            "rank 0 calls reduce [4] float32 sum root 0, rank 1 calls reduce [4] float32 sum root 1", found.sentence
        )

    def test_splits_are_compared_in_pairs(self):
        """Splits: what comes in from each rank, what goes out to each."""
        ranks = self.ranks()
        three = {"inputs": (((3,), "float32"),), "outputs": (((3,), "float32"),), "size": 2}
        ranks[0].issue("all_to_all_single", splits=((1, 2), (1, 2)), **three)
        ranks[1].issue("all_to_all_single", splits=((2, 1), (2, 1)), **three)
        self.assertIsNone(first_mismatch([rank.record for rank in ranks]))
        ranks[0].issue("all_to_all_single", splits=((1, 2), (1, 2)), **three)
        ranks[1].issue("all_to_all_single", splits=((1, 2), (2, 2)), **three)
        found = first_mismatch([rank.record for rank in ranks])
        self.assertIn("in call #2", found.sentence)
        self.assertIn("rank 0 sends 2 elements to rank 1, which expects 1", found.sentence)

    def test_messages_are_paired_by_tag_in_order(self):
        ranks = self.ranks()
        for tag in (1, 2):
            ranks[0].issue("send", peer=1, tag=tag)
        for tag in (2, 1):
            ranks[1].issue("recv", inputs=(), outputs=(FLOATS,), peer=0, tag=tag)
        records = [rank.record for rank in ranks]
        self.assertIsNone(first_mismatch(records))
        self.assertEqual(waiting_calls(records), {})
        self.assertIsNone(first_unmatched(records))
        ranks[0].issue("send", peer=1, tag=1)
        self.assertIn("rank 0's send #2 to rank 1", first_unmatched([rank.record for rank in ranks]).sentence)

    def test_a_receive_from_any_rank_waits_while_one_may_send(self):
        ranks = self.ranks(3)
        ranks[0].issue("recv", inputs=(), outputs=(FLOATS,))
        waiting = waiting_calls([rank.record for rank in ranks])
        self.assertEqual(waiting[0][0].missing, (1, 2))
        self.assertEqual(deadlocked(waiting, {1: "passed"}), {})
        self.assertEqual(list(deadlocked(waiting, {1: "passed", 2: "passed"})), [0])
        ranks[2].issue("send", peer=0)
        self.assertEqual(waiting_calls([rank.record for rank in ranks]), {})

    def test_a_collective_that_all_have_issued_is_no_wait(self):
        ranks = self.ranks()
        for rank in ranks:
            rank.issue("all_reduce", op="sum")
        self.assertEqual(waiting_calls([rank.record for rank in ranks]), {})

    # -- orders

    def test_opposite_orders(self):
        ranks = self.ranks(2, dp=[0, 1], tp=[0, 1])
        for rank, order in zip(ranks, (("dp", "tp"), ("tp", "dp")), strict=True):
            for group in order:
                rank.issue("all_reduce", group=group)
        found = first_inversion([rank.record for rank in ranks])
        self.assertIn("opposite orders", found.sentence)
        self.assertIn("rank 0 issues all_reduce #1 of group dp before all_reduce #1 of group tp", found.sentence)
        self.assertIn("rank 1 issues all_reduce #1 of group tp before all_reduce #1 of group dp", found.sentence)
        self.assertEqual(uses_groups([rank.header for rank in ranks]), 2)

    def test_an_order_of_three_ranks(self):
        ranks = self.ranks(3, a=[0, 1], b=[1, 2], c=[0, 2])
        for rank, order in zip(ranks, (("c", "a"), ("a", "b"), ("b", "c")), strict=True):
            for group in order:
                rank.issue("all_reduce", group=group)
        self.assertIn("ranks 0-2 issue", first_inversion([rank.record for rank in ranks]).sentence)

    def unbuffered(self, *of_ranks, with_messages_alone=True):
        """Each rank's calls: "S1" sends to rank 1, "R1" receives from it, "s1" does not wait, "C" is for all."""
        ranks = self.ranks(len(of_ranks))
        for rank, calls in zip(ranks, of_ranks, strict=True):
            for call in calls.split():
                if call[0] in "cC":
                    rank.issue("all_reduce", blocks=call == "C")
                else:
                    kind = "send" if call[0] in "sS" else "recv"
                    tensors = {"inputs": (), "outputs": (FLOATS,)} if kind == "recv" else {}
                    rank.issue(kind, peer=int(call[1]), blocks=call[0].isupper(), **tensors)
        found = first_unbuffered([rank.record for rank in ranks], with_messages_alone)
        return found.sentence if found is not None else None

    def test_sends_that_are_not_buffered(self):
        for programs in (
            ("S1 R1", "R0 S0"),
            ("S1 C", "R0 C"),
            ("s1 C", "C R0"),
            ("C S1 R1 C", "C s0 R0 C"),
            ("S1 R2 C", "S2 R0 C", "R1 S0 C"),
        ):
            self.assertIsNone(self.unbuffered(*programs), programs)
        for programs, parts in (
            (("S1 R1", "S0 R0"), ("rank 0 waits", "send #1 to rank 1", "for rank 1", "send #1 to rank 0")),
            (("S1 C", "C R0"), ("rank 0 waits", "send #1 to rank 1", "all_reduce #1")),
            (("S1 R2", "S2 R0", "S0 R1"), ("for rank 1", "for rank 2", "for rank 0")),
        ):
            said = self.unbuffered(*programs)
            for part in ("if sends were not buffered", *parts):
                self.assertIn(part, said or "", programs)
        self.assertIsNone(self.unbuffered("S1 R1", "S0 R0", with_messages_alone=False))
        self.assertIn("all_reduce", self.unbuffered("S1 C", "C R0", with_messages_alone=False))

    def test_an_order_of_threads(self):
        """A thread of its own issues the calls of one group."""
        ranks = self.ranks(2, dp=[0, 1], tp=[0, 1])
        for rank, order in zip(ranks, (("dp", "tp"), ("tp", "dp")), strict=True):
            for group in order:
                issue = functools.partial(rank.issue, "all_reduce", group=group)
                thread = threading.Thread(target=issue) if group == "tp" else None
                if thread is None:
                    issue()
                else:
                    thread.start()
                    thread.join()
        self.assertIsNone(first_inversion([rank.record for rank in ranks]))

    def test_the_same_order_again_and_again(self):
        ranks = self.ranks(2, dp=[0, 1], tp=[0, 1])
        for rank in ranks:
            for group in ("dp", "tp", "dp", "tp", "tp"):
                rank.issue("all_reduce", group=group)
        self.assertIsNone(first_inversion([rank.record for rank in ranks]))


if __name__ == "__main__":
    run_tests()

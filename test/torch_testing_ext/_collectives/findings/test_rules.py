"""Tests the rules on records made by hand: which ranks disagree, which can go on, and which are abandoned."""

import json
import unittest
from dataclasses import replace

from torch_testing_ext._collectives.blocked.rank_state import PythonThread, RankState, ThreadState, why_not_blocked
from torch_testing_ext._collectives.findings.abandoned_calls import first_abandoned
from torch_testing_ext._collectives.findings.deadlocks import deadlocked, describe_deadlock, waiting_calls
from torch_testing_ext._collectives.findings.finding import FindingKind
from torch_testing_ext._collectives.findings.mismatches import first_mismatch
from torch_testing_ext._collectives.findings.uneven_calls import differences
from torch_testing_ext._collectives.proof.proof_of_hang import Evidence, ProofRules, judge_probe
from torch_testing_ext._collectives.records.issued_calls import GroupRecord, make_record, shared_groups
from torch_testing_ext._collectives.records.raw_records import read_entry
from torch_testing_ext._process import messages
from torch_testing_ext._process.code_sites import Site
from torch_testing_ext._torch.signs.recorded_entries import RecordedEntry
from torch_testing_ext.common_utils import run_tests
from torch_testing_ext.launch.accounts import RankEnding
from torch_testing_ext.launch.judging import judge
from torch_testing_ext.launch.rank_reports import RankReport
from torch_testing_ext.launch.verdict import Case

ALL = (0, 1, 2)


def entry(order, group, kind="all_reduce", count=4, dtype="Float", over=True, **more):
    sizes = [] if kind == "barrier" else [[count]]
    return {
        "record_id": order,
        "group": group,
        "process_group": ["?", "?"],
        "profiling_name": f"gloo:{kind}",
        "input_sizes": sizes,
        "output_sizes": sizes,
        "input_dtypes": [dtype] * len(sizes),
        "output_dtypes": [dtype] * len(sizes),
        "retired": over,
        "timeout_ms": 1_800_000,
        "is_p2p": False,
        "site": Site("/home/me/test_thing.py", 10 + order, "test_it"),
        **more,
    }


def group(rank, members=ALL, name="0", description=None):
    members = tuple(members)
    described = description if description is not None else "default_pg" if members == ALL else "dp"
    return GroupRecord(name, described, members, members.index(rank))


def record(rank, groups, *entries, is_whole=True):
    issued = [
        read_entry(RecordedEntry(each), each["group"], each["site"], each.get("raised", False)) for each in entries
    ]
    return make_record(rank, groups, issued, is_whole)


def world(*of_ranks, groups=None):
    """The records of ranks that have only the default group, from the entries of each."""
    return [record(rank, groups(rank) if groups else [group(rank)], *entries) for rank, entries in enumerate(of_ranks)]


class TestMismatch(unittest.TestCase):
    def differs(self, one, other, expected=True):
        records = world([one], [other], [one])
        found = first_mismatch(records)
        self.assertEqual(found is not None, expected, found)
        return found

    def test_equal_calls(self):
        """Ranks that issue the same agree, whatever else differs, and if not all records are known."""
        same = [record(rank, [group(rank)], entry(rank, 0, over=bool(rank), site=None)) for rank in ALL]
        self.assertIsNone(first_mismatch(same))
        self.assertIsNone(first_mismatch(same[:2]))

    def test_what_must_agree(self):
        for kind in ("all_reduce", "broadcast", "reduce", "all_gather", "gather", "scatter", "sparse_all_reduce"):
            with self.subTest(kind=kind):
                self.differs(entry(0, 0, kind), entry(0, 0, kind, dtype="Int"))
                self.differs(entry(0, 0, kind), entry(0, 0, kind, count=5))
                self.differs(entry(0, 0, kind), entry(0, 0, "barrier"))
        self.differs(entry(0, 0, "all_to_all"), entry(0, 0, "all_to_all", dtype="Int"))

    def test_what_may_differ(self):
        self.differs(entry(0, 0, "all_to_all"), entry(0, 0, "all_to_all", count=5), False)
        flat, square = entry(0, 0), entry(0, 0, input_sizes=[[2, 2]])
        self.differs(flat, square, False)
        self.differs(entry(0, 0, "gather", output_sizes=[[3, 4]]), entry(0, 0, "gather", output_sizes=[]), False)
        self.differs(entry(0, 0, over=True), entry(5, 0, over=False, site=None), False)

    def test_sentence_and_lines(self):
        found = self.differs(entry(0, 0), entry(0, 0, dtype="Int"))
        where = "call #1 of the default group (ranks 0-2)"
        parts = "rank 1 calls all_reduce [4] int32, ranks 0, 2 call all_reduce [4] float32"
        self.assertEqual(found.sentence, f"ranks disagree in {where}: {parts}")
        brief = "rank 1 calls all_reduce [4] int32, the others call all_reduce [4] float32 in call #1 of"
        self.assertEqual(found.title, f"{brief} the default group")
        self.assertEqual(str(found.lines[1]), "rank 1: all_reduce [4] int32   test_thing.py:10 in test_it")
        self.assertEqual((found.kind, found.ranks), (FindingKind.MISMATCH, (1,)))

    def test_calls_side_by_side(self):
        same = [entry(order, 0, count=10**order) for order in range(10)]
        records = world(*([*same, entry(10, 0, dtype=dtype)] for dtype in ("Float", "Int", "Float")))
        found = first_mismatch(records)
        wanted = [
            "       rank 1                            ranks 0, 2",
            "   #8  all_reduce [10000000] float32     all_reduce [10000000] float32",
            "   #9  all_reduce [100000000] float32    all_reduce [100000000] float32",
            "  #10  all_reduce [1000000000] float32   all_reduce [1000000000] float32",
            "> #11  all_reduce [4] int32              all_reduce [4] float32",
        ]
        self.assertEqual([*map(str.split, found.table)], [*map(str.split, wanted)])
        self.assertEqual(len({row.index("all_reduce", 10) for row in found.table[1:]}), 1)
        self.assertIn(f"{found.lines[-1]}\n\n  {found.table[0]}", found.calls)
        self.assertEqual(self.differs(entry(0, 0), entry(0, 0, count=5)).table, ())

    def test_places_do_not_depend_on_sequence_numbers(self):
        """Sends and receives use up numbers, but are not recorded."""
        one = [entry(0, 0, collective_seq_id=1), entry(1, 0, "barrier", collective_seq_id=2)]
        other = [entry(0, 0, collective_seq_id=3), entry(1, 0, "barrier", collective_seq_id=9)]
        self.assertIsNone(first_mismatch(world(one, other, one)))

    def test_recorded_sends_do_not_count(self):
        sent = entry(0, 0, "send 0->1", is_p2p=True)
        self.assertIsNone(first_mismatch(world([sent, entry(1, 0)], [entry(0, 0)], [entry(0, 0)])))

    def test_a_rank_that_has_not_come_yet(self):
        self.assertIsNone(first_mismatch(world([entry(0, 0)], [], [entry(0, 0)])))

    def test_the_first_of_several_groups(self):
        def groups(rank):
            return [group(rank), group(rank, ALL, "1", "tp")]

        one = [entry(0, 1), entry(1, 0)]
        other = [entry(0, 1, dtype="Int"), entry(1, 0, dtype="Int")]
        self.assertIn("of group tp", first_mismatch(world(one, other, one, groups=groups)).sentence)

    def test_a_recorder_that_has_dropped_calls(self):
        lost = record(1, [group(1)], entry(0, 0, dtype="Int"), is_whole=False)
        others = world([entry(0, 0)], [], [entry(0, 0)])
        self.assertIsNone(first_mismatch([others[0], lost, others[2]]))
        reports = [RankReport(1, RankEnding.PASSED, recorder=lost)]
        self.assertIn("of rank 1 were not compared", judge(reports, False, Case("test_it")).message)

    def test_a_group_that_is_not_known(self):
        one, other = entry(0, None), entry(0, None, dtype="Int")
        self.assertIsNone(first_mismatch(world([one], [other], [one])))

    def test_groups_of_one_name_in_turn(self):
        def groups(rank):
            return [group(rank), group(rank)]

        one, other = [entry(0, 0), entry(1, 1, count=2)], [entry(0, 0), entry(1, 1, count=3)]
        found = first_mismatch(world(one, other, one, groups=groups))
        self.assertIn("call #1", found.sentence)
        self.assertIn("[3] float32", found.sentence)
        self.assertIsNone(first_mismatch(world(one, one, one, groups=groups)))


class TestJudgedLater(unittest.TestCase):
    def test_a_rank_that_came_after_the_finding(self):
        """The verdict is told from the newest records."""
        one, other = entry(0, 0, over=False), entry(0, 0, "all_gather", over=False)
        found = first_mismatch(world([one], [other], []))
        reports = [
            RankReport(rank, RankEnding.STOPPED, 1.0, recorder=newest)
            for rank, newest in enumerate(world([one], [other], [one]))
        ]
        self.assertIn("rank 0 calls all_reduce", found.title)
        said = judge(reports, False, Case("test_it", file="/home/me/test_thing.py"), finding=found).message
        self.assertIn("rank 1 calls all_gather [4] float32, ranks 0, 2 call all_reduce [4] float32", said)


class TestManyRanks(unittest.TestCase):
    """In a world of 64 ranks, the numbers are told once, and ranks that did the same share a line."""

    def verdict_on(self, entries_of, groups=None, ended=None):
        """The finding, and the text of a failure in which all ranks but those that have ended still ran."""
        world = range(64)
        records = [record(rank, groups(rank) if groups else [group(rank, world)], *entries_of(rank)) for rank in world]
        ended = ended or {}
        found = first_mismatch(records) or describe_deadlock(deadlocked(waiting_calls(records), ended), ended)
        endings = [RankEnding.PASSED if rank in ended else RankEnding.STOPPED for rank in world]
        reports = [RankReport(rank, endings[rank], rank / 10, recorder=one) for rank, one in enumerate(records)]
        message = judge(reports, False, Case("test_it", file="/home/me/test_thing.py"), finding=found).message
        self.assertLess(len(message), 4000, message)
        return found, message

    def test_every_second_rank(self):
        found, message = self.verdict_on(lambda rank: [entry(0, 0, count=4 + rank % 2)])
        call = "all_reduce [4] float32, the others call all_reduce [5] float32"
        self.assertEqual(found.title, f"ranks 0, 2, ..., 62 call {call} in call #1 of group dp")
        self.assertIn("ranks 1, 3, ..., 63: all_reduce [5] float32   test_thing.py:10 in test_it\n", message)
        self.assertIn("ranks 0-63: still running after 0.00 s, terminated\n", message)

    def test_another_call_in_each_rank(self):
        found, message = self.verdict_on(lambda rank: [entry(0, 0), entry(1, 0, count=4 + rank)])
        self.assertIn("rank 3 calls all_reduce [7] float32, ranks 4-63 call something else in call #2", found.title)
        self.assertIn("\n  and 56 more\n", message)

    def test_a_ring(self):
        def pairs(rank):
            return [group(rank, pair, f"p{pair[0]}") for pair in ((rank, (rank + 1) % 64), ((rank - 1) % 64, rank))]

        found, message = self.verdict_on(lambda rank: [entry(0, 0, over=False)], pairs)
        self.assertEqual(len(found.ranks), 64)
        self.assertIn("rank 7: waiting for rank 8 in all_reduce #1 of group dp", message)
        self.assertNotIn("rank 8: waits", message)

    def test_a_rank_that_left(self):
        found, message = self.verdict_on(lambda rank: [entry(0, 0, over=False)] * (rank != 5), ended={5: "passed"})
        said = "rank 5 left before all_reduce #1 of group dp; ranks 0-4, 6-63 are waiting in it"
        self.assertEqual(found.title, said)
        self.assertIn("ranks 0-4, 6-63: waiting for rank 5 in all_reduce #1", message)


class TestSharedGroups(unittest.TestCase):
    def of(self, *groups):
        records = [record(rank, [made], entry(0, 0)) for rank, made in enumerate(groups) if made]
        return [shared.ranks for shared in shared_groups(records)]

    def test_two_worlds_at_once(self):
        """Ranks 0 and 1, and ranks 2 and 3, with the same names: they contradict each other."""
        pair = [GroupRecord("0", "default_pg", (0, 1), index) for index in (0, 1)]
        self.assertEqual(self.of(*pair, *pair), [])

    def test_a_world_in_another_order(self):
        turned = [GroupRecord("0", "default_pg", (0, 1), index) for index in (1, 0)]
        self.assertEqual(self.of(*turned), [(1, 0)])

    def test_half_of_a_world_in_another_order(self):
        """Which rank is the other member is not certain."""
        self.assertEqual(self.of(GroupRecord("0", "default_pg", (0, 1), 1), None), [])

    def test_a_member_that_left_nothing(self):
        self.assertEqual(self.of(group(0), None, group(2)), [ALL])

    def test_a_group_of_one(self):
        self.assertEqual(self.of(GroupRecord("0", "default_pg", (0,), 0)), [])

    def test_other_members(self):
        self.assertEqual(self.of(GroupRecord("0", "x", (0, 1), 0), GroupRecord("0", "x", (0, 1, 2), 1)), [])


def pairs(rank):
    """The default group; of rank 0 and 1, dp and tp; and a further one of each other pair, pp and ep."""
    made = [("dp", (0, 1)), ("tp", (0, 1)), ("pp", (0, 2)), ("ep", (1, 2))]
    return [group(rank), *(group(rank, members, name, name) for name, members in made if rank in members)]


class TestDeadlocked(unittest.TestCase):
    def found(self, *of_ranks, ended=(), groups=pairs):
        records = world(*of_ranks, groups=groups)
        gone = dict.fromkeys(ended, "passed")
        left = deadlocked({rank: calls for rank, calls in waiting_calls(records).items() if rank not in gone}, gone)
        return describe_deadlock(left, gone) if left else None

    def test_opposite_orders(self):
        found = self.found([entry(0, 1, over=False)], [entry(1, 2, over=False)], [])
        self.assertEqual(
            found.sentence,
            "rank 0 waits in group dp (all_reduce #1, line 10) for rank 1, "
            "which waits in group tp (all_reduce #1, line 11) for rank 0",
        )
        self.assertEqual((found.kind, found.ranks), (FindingKind.DEADLOCK, (0, 1)))

    def test_a_member_that_is_not_waiting(self):
        self.assertIsNone(self.found([entry(0, 1, over=False)], [], []))

    def test_a_member_that_has_ended(self):
        found = self.found([entry(0, 1, over=False)], [], [], ended=[1])
        self.assertEqual(found.sentence, "rank 1 left before all_reduce #1 of group dp; rank 0 is waiting in it")
        self.assertEqual((found.kind, found.ranks), (FindingKind.ABANDONED, (1,)))

    def test_waiting_for_a_rank_that_is_deadlocked(self):
        """Rank 2 is not in the cycle, but behind it."""
        found = self.found([entry(0, 1, over=False)], [entry(1, 2, over=False)], [entry(2, 0, over=False)])
        self.assertEqual(found.ranks, (0, 1))
        self.assertEqual(len(found.lines), 3)

    def test_waiting_for_one_that_may_go_on(self):
        """Rank 0 waits for rank 1, which waits for rank 2, which computes."""
        found = self.found([entry(0, 1, over=False)], [entry(1, 3, over=False)], [])
        self.assertIsNone(found)

    def test_a_collective_that_is_being_executed(self):
        """Rank 1 may wait in the one that all have issued."""
        both = entry(0, 0, over=False)
        self.assertIsNone(self.found([both, entry(1, 1, over=False)], [both, entry(1, 2, over=False)], [both]))

    def test_one_of_two_collectives_has_hope(self):
        """Rank 0 may wait for rank 2, which computes."""
        found = self.found([entry(0, 1, over=False), entry(1, 3, over=False)], [entry(0, 2, over=False)], [])
        self.assertIsNone(found)

    def test_a_collective_that_is_over(self):
        """As that of the root of a broadcast, which does not wait."""
        self.assertIsNone(self.found([entry(0, 1, "broadcast")], [entry(1, 2, "broadcast")], []))


class TestLeftAlone(unittest.TestCase):
    def test_a_rank_that_returned(self):
        """The collective of a rank that has lost its peer counts as over."""
        records = world([entry(0, 0), entry(1, 0, count=3)], [entry(0, 0)], [entry(0, 0), entry(1, 0, count=3)])
        found = first_abandoned(records, {1: "passed"}, [0, 2])
        self.assertEqual(found.sentence, "rank 1 left before all_reduce #2; ranks 0, 2 are waiting in it")
        self.assertEqual(found.ranks, (1,))

    def test_all_have_come(self):
        same = [entry(0, 0)]
        self.assertIsNone(first_abandoned(world(same, same, same), {1: "passed"}, [0, 2]))


def thread(number, syscall="202 0x1 0x189 0x0 0x0 0x0 0x0", name="python", state="S", ran="1 2 3"):
    return ThreadState(number, name, state, syscall, ran)


BLOCKED = RankState(
    machine="x86_64",
    main=7,
    threads=(thread(7), thread(8)),
    frames=(("/torch/distributed/distributed_c10d.py", 5, "all_reduce"),),
    in_torch=True,
    calls="wait",
    others=(),
    p2p=False,
    timers=False,
)


class TestDifferences(unittest.TestCase):
    """What is said about ranks that hang, whatever else they do."""

    def sentences(self, *of_ranks, groups=None):
        return [found.sentence for found in differences(world(*of_ranks, groups=groups))]

    def calls(self, number):
        """The latest is not over."""
        return [entry(at, 0, over=at < number - 1) for at in range(number)]

    def test_no_difference(self):
        self.assertEqual(self.sentences(*[self.calls(2)] * 3), [])
        self.assertEqual(self.sentences([], [], []), [])
        self.assertEqual(differences([]), [])

    def test_ranks_that_stayed_behind(self):
        never = "never reached all_reduce #2"
        self.assertEqual(self.sentences(*map(self.calls, (2, 2, 1))), [f"rank 2 {never}; ranks 0, 1 are waiting in it"])
        self.assertEqual(self.sentences(*map(self.calls, (1, 2, 0))), [f"ranks 0, 2 {never}; rank 1 is waiting in it"])

    def test_what_is_shown_of_those_that_are_ahead(self):
        (found,) = differences(world(*map(self.calls, (1, 0, 1))))
        self.assertEqual((found.kind, found.ranks), (FindingKind.BEHIND, (1,)))
        self.assertEqual(str(found.lines[0]).partition("   ")[0], "rank 0: in all_reduce #1 [4]")

    def test_a_call_that_has_ended_keeps_nobody(self):
        """By an error, or since it needed nobody; or its group was destroyed."""
        ended = [entry(0, 0), entry(1, 0)]
        self.assertEqual(self.sentences(ended, ended, [entry(0, 0)]), [])
        caught = [entry(0, 0), entry(1, 0, over=False, raised=True)]
        self.assertEqual(self.sentences(caught, caught, [entry(0, 0)]), [])
        records = world(*map(self.calls, (2, 2, 1)))
        destroyed = [replace(each, living=frozenset()) for each in records]
        self.assertEqual(differences(destroyed), [])
        (group_key,) = records[0].calls
        living = frozenset({(group_key.name, group_key.generation, group_key.world)})
        self.assertEqual(len(differences([replace(each, living=living) for each in records])), 1)

    def test_a_disagreement_is_the_cause_of_lagging_behind(self):
        records = world([entry(0, 0), entry(1, 0)], [entry(0, 0, "barrier")], [])
        self.assertEqual([found.kind for found in differences(records)], [FindingKind.MISMATCH])

    def test_a_rank_whose_calls_are_unknown_is_not_blamed(self):
        """It may hold the GIL, or its recorder may have dropped calls."""
        known = world(self.calls(1), self.calls(1))
        self.assertEqual(differences(known), [])
        dropped = record(2, [group(2)], is_whole=False)
        self.assertEqual(differences([*known, dropped]), [])

    def test_each_group_by_itself(self):
        """Two pairs at different collectives: neither pair is behind the other."""

        def pairs(rank):
            return [
                group(rank, range(4), description="default_pg"),
                group(rank, (rank % 2, rank % 2 + 2), str(1 + rank % 2)),
            ]

        ahead, behind = [entry(0, 1), entry(1, 1, over=False)], [entry(0, 1)]
        self.assertEqual(self.sentences(behind, ahead, behind, ahead, groups=pairs), [])
        self.assertEqual(
            self.sentences(behind, ahead, behind, behind, groups=pairs),
            ["rank 3 never reached all_reduce #2 of group dp; rank 1 is waiting in it"],
        )

    def test_a_rank_outside_of_the_group_is_not_blamed(self):
        def one_pair(rank):
            return [group(rank)] + ([group(rank, (0, 1), "1")] if rank < 2 else [])

        self.assertEqual(self.sentences([entry(0, 1)], [entry(0, 1)], [], groups=one_pair), [])


# Threads that run Python: the native one of number 8 waits without end.
OTHER = PythonThread(number=0, text="thread beat (test_x.py:3)", can_act=True, in_torch=False)
AWAKE, IDLE = replace(OTHER, can_act=False), replace(OTHER, number=8)
IN_TORCH = replace(IDLE, in_torch=True)
SELECTING = replace(OTHER, number=9)
OUTSIDE = {"in_torch": False, "calls": "acquire"}


class TestBlocked(unittest.TestCase):
    def test_other_threads_that_give_no_hope(self):
        joins = {"in_torch": False, "calls": "acquire", "others": (IN_TORCH,)}
        slow, fast = (replace(AWAKE, number=9), thread(9, "230 0x1", ran="1")), thread(9, "230 0x1", ran="2")
        beating = {"others": (slow[0],), "threads": (thread(7), thread(8), slow[1])}
        later = {**beating, "threads": (thread(7), thread(8), fast)}
        in_loop = {
            "others": (replace(SELECTING, in_loop=True),),
            "threads": (thread(7), thread(8), thread(9, "232 0x1")),
        }
        for first, second in (
            ({"others": (IDLE,)}, {"others": (IDLE,)}),
            ({"children": True}, {"children": True}),
            (beating, later),
            (in_loop, in_loop),
            ({"others": (AWAKE, IN_TORCH)}, {"others": (AWAKE, IN_TORCH)}),
            (joins, joins),
            (OUTSIDE, OUTSIDE),
            ({**OUTSIDE, "others": (IDLE,)}, {**OUTSIDE, "others": (IDLE,)}),
            ({"p2p": True, "in_collective": True}, {"p2p": True, "in_collective": True, "others": (IDLE,)}),
            tuple({"at_store": 300.0, "threads": (replace(one, number=7),)} for one in (slow[1], fast)),
        ):
            with self.subTest(second):
                self.assertIsNone(why_not_blocked(replace(BLOCKED, **first), replace(BLOCKED, **second)))
        state = replace(BLOCKED, others=(OTHER,))
        self.assertEqual(why_not_blocked(state, state), "its thread beat (test_x.py:3) may issue collectives")

    def test_proof(self):
        self.assertIsNone(why_not_blocked(BLOCKED, BLOCKED))
        self.assertIsNone(why_not_blocked(*[replace(BLOCKED, in_torch=False)] * 2))

    def test_what_speaks_against_it(self):
        """Each of these alone."""
        timed, shared = "202 0x1 0x189 0x0 0x7fff 0x0 0x0", "202 0x1 0x109 0x0 0x0 0x0 0x0"
        sleeping, woken = "230 0x1 0x0", "202 0x1 0x81 0x0 0x0 0x0 0x0"
        threads = {
            "a timed wait": (thread(7, timed),),
            "a lock shared with other processes": (thread(7, shared),),
            "asleep": (thread(7, sleeping),),
            "waking others": (thread(7, woken),),
            "running": (thread(7, "running", state="R"),),
            "in a disk": (thread(7, state="D"),),
            "another thread in a timed wait": (thread(7), thread(8, timed)),
            "not shown": (thread(7, ""),),
        }
        others = {
            "a Python thread that may act": {"others": (OTHER,)},
            "one that may be woken": {"others": (replace(OTHER, number=8), replace(OTHER, can_act=False))},
            "one that selects": {"others": (SELECTING,), "threads": (thread(7), thread(8), thread(9, "232 0x1"))},
            "woken by a thread": {"in_torch": False, "calls": "acquire", "others": (IN_TORCH, AWAKE)},
            "woken by a child": {"in_torch": False, "calls": "acquire", "others": (IN_TORCH,), "children": True},
            "a timer": {"timers": True},
            "sends": {"p2p": True},
            "a thread that may receive": {"p2p": True, "in_collective": True, "others": (IN_TORCH,)},
            "another machine": {"machine": "riscv64"},
        }
        for name, fields in {**{name: {"threads": each} for name, each in threads.items()}, **others}.items():
            with self.subTest(name):
                state = replace(BLOCKED, **fields)
                self.assertIsNotNone(why_not_blocked(state, state))

    def test_changes_between_two_looks(self):
        ran = replace(BLOCKED, threads=(thread(7, ran="2 2 3"), thread(8)))
        more = replace(BLOCKED, threads=(thread(7), thread(8), thread(9)))
        elsewhere = replace(BLOCKED, frames=(("/torch/distributed/distributed_c10d.py", 5, "broadcast"),))
        for other in (ran, more, elsewhere, None):
            self.assertIsNotNone(why_not_blocked(BLOCKED, other))
            if other is not more:
                self.assertIsNotNone(why_not_blocked(other, BLOCKED))

    def test_threads_of_gloo_do_not_count(self):
        for name in ("gloo_tcp_loop", "pt_gloo_runloop", "pt_tcpstore_uv", "pt_tcpstore"):
            first, second = (
                replace(BLOCKED, threads=(thread(7), thread(9, "232 0x1 0x0 0x0 0xa", name, state, ran)))
                for state, ran in (("S", "1"), ("R", "2"))
            )
            self.assertIsNone(why_not_blocked(first, second))

    def test_loops_of_gloo_without_a_name(self):
        """As of torch 2.11: 64 events at once, and a wait of 10 ms, which one of the looks has seen."""
        loop, running = thread(9, "232 0x1 0x7f 0x40 0xa 0x0 0x0", ran="1"), thread(9, "running", state="R", ran="2")
        for first, second, is_proof in (
            ((thread(7), loop), (thread(7), running), True),
            ((thread(7), running), (thread(7), loop), True),
            ((thread(7), running), (thread(7), replace(running, ran="3")), False),
            ((thread(7), replace(loop, syscall="232 0x1 0x7f 0x1 0xa 0x0 0x0")), (thread(7), running), False),
            ((replace(loop, number=7),), (replace(loop, number=7, ran="2"),), False),
        ):
            states = (replace(BLOCKED, threads=threads) for threads in (first, second))
            self.assertEqual(why_not_blocked(*states) is None, is_proof)

    def test_as_json(self):
        encoded = json.dumps(messages.encode(BLOCKED))
        self.assertEqual(messages.decode(RankState, json.loads(encoded)), BLOCKED)


class TestProof(unittest.TestCase):
    """What follows from one probe after another."""

    NOTHING = Evidence()

    def probe(self, before, *of_ranks, ended=(), rules=None, groups=pairs, state=BLOCKED):
        """What a probe shows whose answers are these entries. Ranks of `ended` have passed, and left theirs."""
        records = {record.rank: replace(record, state=state) for record in world(*of_ranks, groups=groups)}
        running = {rank: record for rank, record in records.items() if rank not in ended}
        left = {rank: records[rank] for rank in ended}
        return judge_probe(before, running, left, dict.fromkeys(ended, "passed"), rules or ProofRules(endless=60.0))

    def test_what_keeps_a_deadlock_from_being_proven(self):
        state = replace(BLOCKED, others=(OTHER,))
        once = self.probe(self.NOTHING, *self.DEADLOCK, state=state)
        twice = self.probe(once.evidence, *self.DEADLOCK, state=state)
        self.assertEqual((once.doubt, twice.finding), ("", None))
        self.assertEqual(twice.doubt, "rank 0: its thread beat (test_x.py:3) may issue collectives")

    def test_ranks_that_go_on(self):
        after = self.probe(self.NOTHING, [entry(0, 1)], [entry(0, 1)], [])
        self.assertEqual((after.finding, after.is_suspicious), (None, False))

    def test_a_mismatch_needs_a_second_probe(self):
        calls = [entry(0, 0)], [entry(0, 0, "barrier")], []
        first = self.probe(self.NOTHING, *calls, groups=None)
        self.assertEqual((first.finding, first.is_suspicious), (None, True))
        second = self.probe(first.evidence, *calls, groups=None)
        self.assertEqual(second.finding.kind, FindingKind.MISMATCH)

    def test_a_mismatch_is_certain_if_no_rank_is_yet_to_come(self):
        calls = [entry(0, 0)], [entry(0, 0, "barrier")]
        for third, ended in (([entry(0, 0)], ()), ([], (2,))):
            found = self.probe(self.NOTHING, *calls, third, ended=ended, groups=None).finding
            self.assertEqual(found.kind, FindingKind.MISMATCH)

    def test_a_mismatch_that_a_test_allows(self):
        calls = [entry(0, 0)], [entry(0, 0, "barrier")], [entry(0, 0)]
        self.assertIsNone(
            self.probe(self.NOTHING, *calls, groups=None, rules=ProofRules(60.0, may_differ=True)).finding
        )

    def test_a_mismatch_in_a_group_with_a_short_timeout(self):
        """It ends by itself: its end shows what it means."""
        short = {"timeout_ms": 1_000, "over": False}
        calls = [entry(0, 0, **short)], [entry(0, 0, "barrier", **short)], [entry(0, 0, **short)]
        self.assertIsNone(self.probe(self.NOTHING, *calls, groups=None).finding)

    DEADLOCK = [entry(0, 1, over=False)], [entry(1, 2, over=False)], []

    def test_a_deadlock_needs_two_probes_that_show_the_same(self):
        first = self.probe(self.NOTHING, *self.DEADLOCK)
        self.assertEqual((first.finding, first.is_suspicious), (None, True))
        self.assertEqual(self.probe(first.evidence, *self.DEADLOCK).finding.kind, FindingKind.DEADLOCK)

    def own_wait(self, *of_ranks, ranks=(1,)):
        """The finding if these ranks wait for something of their own process, and all have these calls."""
        evidence, own = self.NOTHING, replace(BLOCKED, **OUTSIDE)
        for _ in range(2):
            states = {record.rank: own if record.rank in ranks else BLOCKED for record in world(*of_ranks)}
            records = {record.rank: replace(record, state=states[record.rank]) for record in world(*of_ranks)}
            conclusion = judge_probe(evidence, records, {}, {}, ProofRules(endless=60.0))
            evidence = conclusion.evidence
        return conclusion.finding

    def test_a_wait_for_something_of_the_own_process(self):
        waits = [entry(0, 0, over=False)]
        found = self.own_wait(waits, [], waits)
        self.assertEqual((found.kind, found.ranks), (FindingKind.DEADLOCK, (1,)))
        self.assertIn("rank 1 waits for a lock, a queue, an event or a thread of its own", found.sentence)
        over, waits_again = entry(0, 0), [entry(0, 0), entry(1, 0, over=False)]
        self.assertEqual(self.own_wait(waits_again, [over], waits_again).ranks, (1,))

    def test_a_wait_that_a_signal_of_another_rank_may_end(self):
        """Rank 2 goes on."""
        self.assertIsNone(self.own_wait([entry(0, 0, over=False)], [], []))

    def test_a_wait_that_the_end_of_a_call_may_end(self):
        """All have issued it, and it is not over."""
        runs, waits = entry(0, 0, over=False), [entry(0, 0), entry(1, 0, over=False)]
        self.assertIsNone(self.own_wait(waits, [runs], waits))

    def test_no_rank_waits_in_a_collective(self):
        """The test may be one of waits that somebody outside ends."""
        self.assertIsNone(self.own_wait([], [], [], ranks=(0, 1, 2)))

    def test_ranks_that_moved_on_meanwhile(self):
        first = self.probe(self.NOTHING, *self.DEADLOCK)
        moved = [entry(0, 1), entry(3, 1, over=False)], [entry(0, 1), entry(1, 2, over=False)], []
        second = self.probe(first.evidence, *moved)
        self.assertEqual((second.finding, second.is_suspicious), (None, True))

    def test_ranks_that_may_be_woken(self):
        """The second probe shows the same, but proves nothing: a third one need not come soon."""
        woken = replace(BLOCKED, timers=True)
        first = self.probe(self.NOTHING, *self.DEADLOCK, state=woken)
        second = self.probe(first.evidence, *self.DEADLOCK, state=woken)
        self.assertEqual((second.finding, second.is_suspicious), (None, False))

    def test_waits_that_end_before_the_test(self):
        first = self.probe(self.NOTHING, *self.DEADLOCK, rules=ProofRules(endless=3600.0))
        self.assertEqual((first.finding, first.is_suspicious), (None, False))

    def test_a_rank_that_has_ended(self):
        calls = [entry(0, 1, over=False)], [], []
        first = self.probe(self.NOTHING, *calls, ended=(1,))
        found = self.probe(first.evidence, *calls, ended=(1,)).finding
        self.assertEqual((found.kind, found.ranks), (FindingKind.ABANDONED, (1,)))


if __name__ == "__main__":
    run_tests()

"""Tests what ranks leave: which calls count, of which group, and what the parent makes of them."""

import pickle
import unittest

from torch_testing_ext._collectives.findings.message_pairs import unpaired
from torch_testing_ext._collectives.findings.mismatches import first_mismatch
from torch_testing_ext._collectives.records.raw_records import (
    RawRecord,
    do_members_agree,
    pack_record,
    read_raw,
    unpack_record,
)
from torch_testing_ext.common_utils import run_tests

WORLD = ("0", "default_pg", (0, 1))


def entry(number, kind="all_reduce", size=4, dtype="Float", at=None, name="0", pg_id=0, frames=(), **more):
    return {
        "record_id": number,
        "pg_id": pg_id,
        "process_group": (name, "default_pg"),
        "collective_seq_id": number,
        "profiling_name": f"gloo:{kind}",
        "time_created_ns": 100 + number if at is None else at,
        "input_sizes": [[size]],
        "input_dtypes": [dtype],
        "output_sizes": [[size]],
        "output_dtypes": [dtype],
        "retired": True,
        "timeout_ms": 1000,
        "is_p2p": False,
        "frames": [{"filename": file, "line": line, "name": "f"} for file, line in frames],
        **more,
    }


def left(rank, *entries, groups=None, first=0, errors=(), world="store", at=1.0):
    made = groups if groups is not None else [(*WORLD, rank, world, 50)]
    dumps = [(first, pickle.dumps({"entries": list(entries)})), (0, b"")]
    return pack_record(
        made,
        dumps,
        list(errors),
        "/torch/",
        at,
        sequences={"0": (len(entries), 0, 0)},
    )


def finding(*data, **options):
    records = [record for rank, each in enumerate(data) if (record := read_raw(rank, each)) is not None]
    return first_mismatch(records, **options)


class TestComparison(unittest.TestCase):
    def agree(self, *data):
        return do_members_agree([unpack_record(each) for each in data])

    def test_ranks_that_agree(self):
        """Times, ids and frames are each rank's own."""
        one, other = (
            left(0, entry(0), entry(1, "barrier")),
            left(1, entry(5, pg_id=3), entry(6, "barrier", pg_id=3), first=5),
        )
        self.assertTrue(self.agree(one, other, b""))
        self.assertIsNone(finding(one, other))

    def test_ranks_that_disagree(self):
        for more in ({"kind": "broadcast"}, {"size": 5}, {"dtype": "Int"}):
            with self.subTest(**more):
                here = left(0, entry(0), entry(1, frames=[("/torch/x.py", 1), ("<string>", 2), ("/me/test_it.py", 3)]))
                there = left(1, entry(0), entry(1, **more))
                self.assertFalse(self.agree(here, there))
                found = finding(here, there)
                self.assertIn("ranks disagree in call #2 of the default group", found.sentence)
                self.assertIn("test_it.py:3 in f", found.calls)

    def test_sends_do_not_count(self):
        sent = left(0, entry(0, "send", is_p2p=True), entry(1))
        self.assertTrue(self.agree(sent, left(1, entry(0))))
        self.assertIsNone(finding(sent, left(1, entry(0))))

    def test_an_error_after_the_mismatch(self):
        here, there = left(0, entry(0)), left(1, entry(0, dtype="Int"), errors=[101])
        self.assertIsNotNone(finding(here, there))
        self.assertIsNone(finding(here, there, unless_raised=True))
        self.assertIsNone(finding(there, here, unless_raised=True))

    def test_an_error_before_the_mismatch(self):
        """As of arguments that torch refuses: it has nothing to do with it."""
        here, there = left(0, entry(0)), left(1, entry(0, dtype="Int"), errors=[99])
        self.assertIsNotNone(finding(here, there, unless_raised=True))

    def test_an_error_long_after_the_mismatch(self):
        """Calls that went well have come in between: it has nothing to do with it, either."""
        for later, is_found in ((2, False), (3, True), (10, True)):
            with self.subTest(later=later):
                rest = [entry(number) for number in range(1, later + 1)]
                here = left(0, entry(0), *rest)
                there = left(1, entry(0, dtype="Int"), *rest, errors=[101 + later])
                self.assertEqual(finding(here, there, unless_raised=True) is not None, is_found)

    def test_what_is_torn(self):
        whole = left(0, entry(0))
        for end in range(1, len(whole), 7):
            self.assertIsNone(unpack_record(whole[:end]))


class TestWhatCounts(unittest.TestCase):
    def test_earlier_entries(self):
        """Of a warm-up, or of earlier tests of persistent ranks."""
        here, there = left(0, entry(0, dtype="Int"), entry(1), first=1), left(1, entry(0), entry(1), first=1)
        self.assertTrue(do_members_agree([unpack_record(here), unpack_record(there)]))
        self.assertTrue(unpack_record(here).is_whole)

    def test_entries_that_were_dropped(self):
        lost = left(0, entry(7), first=6)
        self.assertFalse(unpack_record(lost).is_whole)
        self.assertFalse(do_members_agree([unpack_record(lost)]))
        self.assertIsNone(finding(lost, left(1, entry(0, dtype="Int"))))

    def test_a_group_that_was_made_after_the_list_of_groups(self):
        """The rank runs on while it is asked."""
        dump = [(0, pickle.dumps({"version": "2"}))]
        data = pack_record([(*WORLD, 0, "store", 50)], dump, [], "/torch/", 1.0, living=[0, 1])
        self.assertEqual({name for name, _, _ in unpack_record(data).record(0).living}, {"0"})

    def test_no_entries(self):
        empty = pack_record([(*WORLD, 0, "store", 50)], [(0, pickle.dumps({"version": "2"}))], [], "/torch/", 1.0)
        self.assertEqual(unpack_record(empty).calls(), {})
        self.assertTrue(unpack_record(empty).is_whole)


class TestGroups(unittest.TestCase):
    def groups_of(self, made, *entries):
        keys = unpack_record(left(0, *entries, groups=made)).calls()
        return {(key.name, key.generation, key.world): len(calls) for key, calls in keys.items()}

    def test_groups_of_one_name_in_turn(self):
        made = [(*WORLD, 0, "store", 50), (*WORLD, 0, "store", 150)]
        found = self.groups_of(made, entry(0, at=60), entry(1, at=160, pg_id=1), entry(2, at=170, pg_id=1))
        self.assertEqual(found, {("0", 0, "store"): 1, ("0", 1, "store"): 2})

    def test_a_first_group_that_issued_nothing(self):
        made = [(*WORLD, 0, "store", 50), (*WORLD, 0, "store", 150)]
        self.assertEqual(self.groups_of(made, entry(0, at=160, pg_id=1)), {("0", 1, "store"): 1})

    def test_worlds_of_two_stores(self):
        made = [(*WORLD, 0, "a", 50), (*WORLD, 0, "b", 150)]
        found = self.groups_of(made, entry(0, at=60), entry(1, at=160, pg_id=1))
        self.assertEqual(found, {("0", 0, "a"): 1, ("0", 0, "b"): 1})

    def test_a_group_that_was_not_noted(self):
        """Its name is that of a known one at the same time: neither is certain."""
        self.assertEqual(self.groups_of([(*WORLD, 0, "a", 50)], entry(0), entry(1, pg_id=9)), {})
        self.assertEqual(self.groups_of([(*WORLD, 0, "a", 50)], entry(0, at=40)), {})
        self.assertEqual(self.groups_of([(*WORLD, 0, "a", 50)], entry(0, name="")), {})

    def test_a_group_of_which_gloo_records_two_backends(self):
        """With fake accelerators: what it computes for them has their backend as the description of the group."""
        on_devices = {"process_group": ("0", "fakeccl"), "pg_id": 7}
        data = left(0, entry(0, "barrier"), entry(1, **on_devices), entry(2, "broadcast", **on_devices))
        self.assertEqual(len(unpack_record(data).calls()), 1)
        calls = {key.backend: [str(call) for call in calls] for key, calls in read_raw(0, data).calls.items()}
        self.assertEqual(calls, {"gloo": ["barrier #1 [4]"], "fakeccl": ["all_reduce #1 [4]", "broadcast #2 [4]"]})

    def test_a_group_that_outlives_another_of_its_name(self):
        made = [(*WORLD, 0, "store", 50), (*WORLD, 0, "store", 150)]
        self.assertEqual(self.groups_of(made, entry(0, at=60), entry(1, at=160)), {})

    def test_a_clock_that_was_set_back(self):
        made = [(*WORLD, 0, "store", 50), (*WORLD, 0, "store", 40)]
        self.assertFalse(RawRecord(left(0, groups=made)).is_whole)

    def test_worlds_whose_ranks_changed(self):
        """Rank 2 made its first group of that name when rank 0 made its second: nobody is missing in either."""
        from torch_testing_ext._collectives.findings.deadlocks import waiting_calls

        both, three = (0, 1), (0, 1, 2)
        data = [left(rank, groups=[("0", "x", both, rank, "s", 50), ("0", "x", three, rank, "s", 60)]) for rank in both]
        waiting = pack_record(
            [("0", "x", both, 0, "s", 50), ("0", "x", three, 0, "s", 60)],
            [(0, pickle.dumps({"entries": [entry(0, at=70, retired=False)]}))],
            [],
            "/torch/",
            1.0,
        )
        last = left(2, groups=[("0", "x", three, 2, "s", 60)])
        records = [read_raw(rank, each) for rank, each in enumerate((waiting, data[1], last))]
        self.assertEqual(waiting_calls(records), {})


def message(number, kind, peer, size=4, dtype="float32", is_issued=True):
    more = {"is_p2p": True, "message": number, "is_issued": is_issued, "peer": peer, "tag": 0}
    fields = entry(number, kind, size, dtype, **more)
    # Its end is not known.
    del fields["retired"]
    return fields


class TestMessages(unittest.TestCase):
    """Two ranks, of which the first sends and the second receives."""

    def records(self, sent, received, used_up=0, seen=None):
        groups = [("0", "default_pg", (0, 1), rank, "store", 50) for rank in (0, 1)]
        data = []
        for group, entries in zip(groups, (sent, received), strict=True):
            number = used_up + sum(each["is_issued"] for each in entries) if seen is None else seen
            dumps = [(0, pickle.dumps({"entries": entries}))]
            data.append(pack_record([group], dumps, [], "/torch/", 1.0, sequences={"0": (number, 0, used_up)}))
        return [unpack_record(each) for each in data]

    def lone(self, raw):
        return [wait.title for wait in unpaired([each.record(rank) for rank, each in enumerate(raw)])]

    def test_those_that_fit(self):
        for used_up in (0, 7):
            raw = self.records([message(0, "send", 1)], [message(0, "recv", 0)], used_up)
            self.assertTrue(do_members_agree(raw))
            self.assertEqual(self.lone(raw), [])

    def test_another_type_and_another_size(self):
        for other in ({"dtype": "int32"}, {"size": 5}):
            raw = self.records([message(0, "send", 1)], [message(0, "recv", 0, **other)])
            self.assertFalse(do_members_agree(raw))
            found = first_mismatch([each.record(rank) for rank, each in enumerate(raw)])
            self.assertIn("message #1 of the default group", found.sentence)

    def test_one_without_a_partner(self):
        raw = self.records([message(0, "send", 1), message(1, "send", 1)], [message(0, "recv", 0)])
        self.assertFalse(do_members_agree(raw))
        self.assertEqual(self.lone(raw), ["send #2 to rank 1 [4]"])

    def test_around_a_monitored_barrier(self):
        """The barrier has used up numbers for its own messages, and the collective after it counts its tags."""
        barrier = entry(1, "monitored_barrier", messages=2, tags=2)
        last = entry(3, "all_reduce", collective_seq_id=3)
        barrier = entry(1, "monitored_barrier", messages=2, tags=2)
        last = entry(3, "all_reduce", collective_seq_id=3)
        for after in ([], [last]):
            sent = [message(0, "send", 1), barrier, message(2, "send", 1), *after]
            received = [message(0, "recv", 0), barrier, message(2, "send", 0), *after]
            raw = self.records(sent, received, seen=4 + len(after))
            self.assertEqual(sorted(self.lone(raw)), ["send #1 to rank 0 [4]", "send #2 to rank 1 [4]"])
            self.assertEqual(self.lone(self.records(sent, received, seen=5 + len(after))), [])

    def test_one_that_raised_uses_up_no_number(self):
        raw = self.records([], [message(0, "recv", 0, is_issued=False)])
        self.assertEqual(self.lone(raw), ["recv #1 from rank 0 [4]"])

    def test_roots(self):
        """A root that nobody has noted, or that two threads may have meant, agrees with any."""
        call, other = entry(0, "broadcast"), entry(0, "all_reduce")
        noted = {0: [[0, "broadcast", 1, 90, 110]], 1: [[0, "broadcast", 0, 90, 0]]}
        two = [*noted[1], [0, "broadcast", 0, 95, 105]]
        late, of_another_group = [[0, "broadcast", 0, 101, 110]], [[1, "broadcast", 0, 90, 110]]
        self.assertEqual(self.roots(noted[0], noted[0], call), [1, 1])
        self.assertEqual(self.roots(noted[0], noted[1], call), "rank 0 calls broadcast [4] float32 root 1, rank 1 cal")
        for unknown in ([], two, late, of_another_group):
            self.assertEqual(self.roots(noted[0], unknown, call), [1, None])
        self.assertEqual(self.roots(noted[0], noted[1], other), [None, None])

    def roots(self, first, second, call):
        """The details of a call of each rank, with these roots; or the beginning of the mismatch."""
        data = []
        for rank, roots in enumerate((first, second)):
            dumps = [(0, pickle.dumps({"entries": [call]})), (0, pickle.dumps({"roots": roots}))]
            data.append(pack_record([("0", "default_pg", (0, 1), rank, "store", 50)], dumps, [], "/torch/", 1.0))
        found = finding(*data)
        if found is not None:
            return found.brief[:53]
        return [calls[0].root for rank, each in enumerate(data) for calls in read_raw(rank, each).calls.values()]

    def test_with_some_that_nobody_has_noted_none_is_compared(self):
        raw = self.records([message(0, "send", 1)], [], seen=3)
        self.assertEqual(self.lone(raw), [])


if __name__ == "__main__":
    run_tests()

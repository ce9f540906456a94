"""Tests where hung ranks are and which one the verdict names, with records and stacks made by hand."""

import tempfile
import unittest
from dataclasses import replace
from pathlib import Path

import torch_testing_ext
from torch_testing_ext._collectives.findings.uneven_calls import differences
from torch_testing_ext._collectives.records.issued_calls import GroupRecord, make_record
from torch_testing_ext._collectives.records.raw_records import pack_record, read_entry, read_raw
from torch_testing_ext._process import system
from torch_testing_ext._process.code_sites import Site
from torch_testing_ext._tests.outcomes import TestOutcome
from torch_testing_ext._tests.source_files import source_text
from torch_testing_ext._torch.signs.recorded_entries import RecordedEntry
from torch_testing_ext.common_utils import run_tests
from torch_testing_ext.launch import Case, RankEnding, RankReport, hang
from torch_testing_ext.launch.judging import judge

PACKAGE = Path(torch_testing_ext.__file__).parent
TEST = "/home/me/test_thing.py"
ALL = (0, 1)


def entry(kind, record, shape=(4,), group=0, **more):
    """One entry of a rank's record. `record`: its place in the rank; `group`: the number of its group."""
    return {
        "record_id": record,
        "group": group,
        "profiling_name": f"gloo:{kind}",
        "input_sizes": [list(shape)],
        "is_p2p": False,
        **more,
    }


def recorded(*entries, groups=(ALL,), rank=0, is_whole=True):
    """The record of a rank that has made the groups with these members; the first one is the default group."""
    made = [
        GroupRecord(str(at), "undefined" if at else "default_pg", members, members.index(rank))
        for at, members in enumerate(groups)
        if rank in members
    ]
    issued = [read_entry(RecordedEntry(each), each["group"], each.get("site")) for each in entries]
    return make_record(rank, made, issued, is_whole)


def running(rank, recorder=None, stacks=""):
    return RankReport(rank, RankEnding.STOPPED, 1.0, recorder=recorder, stacks=stacks)


def stack(*frames, title="Current thread 0x00007f (most recent call first):"):
    """A faulthandler dump of one thread; frames are (file, line, name), innermost first."""
    return (
        "\n".join([title, *(f'  File "{file}", line {line} in {function}' for file, line, function in frames)]) + "\n"
    )


def over(rank, recorder):
    """A persistent rank or a thread that has finished its test."""
    return RankReport(rank, RankEnding.PASSED, recorder=recorder)


class TestTitle(unittest.TestCase):
    """The first line of a verdict, which all reports show, names the culprit."""

    def verdict(self, *reports, culprit):
        verdict = judge(reports, True, Case("T.test_x"))
        self.assertEqual((verdict.outcome, verdict.culprit), (TestOutcome.TIMEOUT, culprit))
        return verdict.message

    def title(self, *reports, culprit):
        return self.verdict(*reports, culprit=culprit).partition("\n")[0].partition("; ")[2]

    def test_a_rank_that_lags_behind(self):
        ahead, behind = (
            running(rank, recorded(*(entry("all_reduce", n) for n in range(2 - rank)), rank=rank)) for rank in (0, 1)
        )
        message = self.verdict(ahead, behind, culprit=1)
        self.assertIn("rank 1 never reached all_reduce #2; rank 0 is waiting in it; timed out after 1.0 s\n", message)
        self.assertIn("\n=> rank 1 never reached all_reduce #2; rank 0 is waiting in it\n", f"{message}\n")

    def test_ranks_that_disagree(self):
        kinds = ("all_reduce", "all_reduce", "all_gather")
        reports = [
            running(rank, recorded(entry(kind, 0), groups=((0, 1, 2),), rank=rank)) for rank, kind in enumerate(kinds)
        ]
        message = self.verdict(*reports, culprit=2)
        sentence = (
            "ranks disagree in call #1 of the default group (ranks 0-2): rank 2 calls all_gather [4], ranks 0, 1 "
            "call all_reduce [4]"
        )
        title = "rank 2 calls all_gather [4], the others call all_reduce [4] in call #1 of the default group"
        self.assertTrue(message.startswith(f"{title}; timed out after 1.0 s\n"), message)
        self.assertEqual(message.count("=> "), 1)
        self.assertIn(f"\n=> {sentence}", message)

    def test_ranks_that_wait_for_each_other(self):
        """Nobody has proven that, or it would have ended the test before its time-out."""
        reports = [
            running(rank, recorded(entry("all_reduce", 0, group=rank), groups=(ALL, ALL), rank=rank)) for rank in (0, 1)
        ]
        message = self.verdict(*reports, culprit=0)
        self.assertRegex(
            message, r"\Asuspected deadlock: rank 0 waits in .* for rank 1, which waits in .* for rank 0; timed out"
        )

    def test_a_rank_that_is_over(self):
        waits = running(1, recorded(entry("all_reduce", 0), rank=1))
        message = self.verdict(over(0, recorded()), waits, culprit=0)
        sentence = "rank 0 left before all_reduce #1; rank 1 is waiting in it"
        self.assertTrue(message.startswith(f"{sentence}; timed out after "), message)
        self.assertEqual(message.count("=> "), 1)

    def test_a_rank_that_is_over_and_not_in_the_group(self):
        record = recorded(entry("all_reduce", 0, group=1), groups=(ALL, (1,)), rank=1)
        self.assertEqual(
            self.title(over(0, recorded()), running(1, record), culprit=1),
            "rank 1 of 2 still running",
        )

    def test_nothing_known(self):
        self.assertEqual(self.title(running(0), running(1), culprit=0), "all 2 ranks still running")


class TestExplain(unittest.TestCase):
    GROUPS = ((0, 1, 2, 3),)

    def test_a_line_for_each_running_rank(self):
        calls = [entry("all_reduce", 0), entry("all_reduce", 1)]
        reports = [
            running(0, recorded(*calls, groups=self.GROUPS), stack((TEST, 12, "test_x"))),
            RankReport(1, RankEnding.ERROR, 1.0),
            running(2, recorded(groups=self.GROUPS, rank=2), stack((TEST, 10, "test_x"))),
            running(3),
        ]
        (finding,) = differences([r.recorder for r in reports if r.recorder])
        self.assertEqual(
            hang.explain_hang(reports, TEST, [finding]),
            """\
where the running ranks are:
  rank 0: test_thing.py:12 in test_x; last collective: all_reduce #2 [4]
  rank 2: test_thing.py:10 in test_x; no collective yet
  rank 3: place unknown; its collectives are not known (it did not answer)
=> rank 2 never reached all_reduce #2; rank 0 is waiting in it""",
        )

    def last(self, record):
        return hang.explain_hang([running(0, record)], TEST, ()).partition("; ")[2]

    def test_the_last_of_all_groups(self):
        """And a line for each group, in which the calls are counted from 1."""
        calls = [entry("broadcast", 8, group=1), entry("all_reduce", 7)]
        first, *lines = self.last(recorded(*calls, groups=(ALL, (0, 1)))).splitlines()
        self.assertEqual(first, "last collective: broadcast #1 [4]")
        self.assertEqual(
            lines,
            [
                "    the default group (ranks 0, 1): all_reduce #1 [4]",
                "    group 1 (ranks 0, 1): broadcast #1 [4]",
            ],
        )

    def test_sends_are_no_collectives(self):
        record = recorded(entry("all_reduce", 1), entry("send 0->1", 2, is_p2p=True))
        self.assertEqual(self.last(record).splitlines()[0], "last collective: all_reduce #1 [4]")
        self.assertEqual(self.last(recorded(entry("send 0->1", 2, is_p2p=True))).splitlines()[0], "no collective yet")

    def test_a_barrier_has_no_shape(self):
        self.assertEqual(self.last(recorded(entry("barrier", 3, input_sizes=[]))), "last collective: barrier #1")

    def test_the_number_is_unknown_if_calls_were_dropped(self):
        self.assertEqual(self.last(recorded(entry("all_reduce", 3), is_whole=False)), "last collective: all_reduce [4]")

    def test_incomplete_records(self):
        """They are unknown: an empty list would mean that the rank has reached no collective."""
        whole = pack_record([], [], [], "/torch/", 1.0)
        self.assertEqual(self.last(read_raw(0, whole)), "no collective yet")
        for data in (b"", b"{", b"{}", b"\0", whole[:-10], whole[1:]):
            with self.subTest(data=data):
                self.assertEqual(self.last(read_raw(0, data)), "its collectives are not known (it did not answer)")


class TestRows(unittest.TestCase):
    """The screen shows a line of the test for each rank, never one of the library that the rank was in."""

    def row(self, *frames, has_raised):
        """What is said of a rank that has issued an all_reduce at line 12 and was stopped in these frames."""
        site = Site(TEST, 12, "test_x")
        record = replace(recorded(entry("all_reduce", 0, site=site)), has_raised=has_raised)
        reports = [running(0, record, stack(*frames)), running(1)]
        rows = judge(reports, True, Case("T.test_x", file=TEST)).failure.rows
        (row,) = (row for row in rows if row.ranks == (0,))
        return row.did, row.site

    def test_a_rank_whose_exception_is_being_told(self):
        harness = (str(PACKAGE / "launch" / "in_rank.py"), 173, "<lambda>")
        for frame in (("/usr/lib/python3.11/ast.py", 50, "parse"), harness):
            with self.subTest(frame=frame):
                expected = "in all_reduce #1 [4], then stopped", Site(TEST, 12, "test_x")
                self.assertEqual(self.row(frame, harness, has_raised=True), expected)
                expected = "after all_reduce #1 [4]", Site(TEST, 12, "test_x")
                self.assertEqual(self.row(frame, harness, has_raised=False), expected)

    def test_a_rank_in_its_test(self):
        library = ("/usr/lib/python3.11/ast.py", 50, "parse")
        expected = "after all_reduce #1 [4]", Site(TEST, 14, "test_x")
        self.assertEqual(self.row(library, (TEST, 14, "test_x"), has_raised=True), expected)
        in_call = "in all_reduce #1 [4]", Site(TEST, 12, "test_x")
        self.assertEqual(self.row(library, (TEST, 12, "test_x"), has_raised=False), in_call)


class TestWhere(unittest.TestCase):
    GLOO = ("/usr/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py", 2810, "all_reduce")

    def test_the_innermost_frame_in_the_tests_file(self):
        stacks = stack(self.GLOO, (TEST, 30, "helper"), (TEST, 12, "test_x"))
        self.assertEqual(hang.site_in_words(stacks, TEST), "test_thing.py:30 in helper")

    def test_without_one_the_innermost_frame_of_user_code(self):
        stacks = stack(self.GLOO, ("/home/me/model.py", 3, "forward"), ("/home/me/train.py", 9, "step"))
        self.assertEqual(hang.site_in_words(stacks, TEST), "model.py:3 in forward")

    def test_without_one_the_innermost_frame_of_all(self):
        stacks = stack(self.GLOO, (str(PACKAGE / "_testing" / "bases" / "multi_process.py"), 9, "run_test"))
        self.assertEqual(hang.site_in_words(stacks, TEST), "distributed_c10d.py:2810 in all_reduce")

    def test_the_standard_library_is_a_library(self):
        stacks = stack(("/usr/lib/python3.11/threading.py", 320, "wait"), ("/home/me/model.py", 3, "forward"))
        self.assertEqual(hang.site_in_words(stacks, ""), "model.py:3 in forward")

    def test_a_users_directory_may_have_the_name_of_the_package(self):
        """A user's test of torch_testing_ext does not belong to torch_testing_ext."""
        stacks = stack(("/home/me/test/torch_testing_ext/support.py", 3, "hang"), ("/home/me/run.py", 1, "main"))
        self.assertEqual(hang.site_in_words(stacks, TEST), "support.py:3 in hang")

    def test_the_source_line_is_shown(self):
        with tempfile.TemporaryDirectory() as directory:
            file = Path(directory, "test_real.py")
            file.write_text("def test_x():\n    dist.all_reduce(t)  # \u00e9\n", encoding="latin-1")
            stacks = stack((file, 2, "test_x"))
            self.assertEqual(
                hang.site_in_words(stacks, str(file)).partition("  #")[0],
                "test_real.py:2 in test_x (dist.all_reduce(t)",
            )
            self.assertEqual(hang.site_in_words(stack((file, 9, "test_x")), str(file)), "test_real.py:9 in test_x")

    def test_nothing_known(self):
        for stacks in (
            "",
            "\n",
            "Fatal Python error: Segmentation fault\n",
            "Current thread 0x1 (most recent call first):\n",
        ):
            with self.subTest(stacks=stacks):
                self.assertEqual(hang.site_in_words(stacks, TEST), "place unknown")

    def test_the_main_thread_is_the_last(self):
        stacks = (
            stack(("/a.py", 1, "worker"), title="Thread 0x1 (most recent call first):")
            + "\n"
            + stack(("/b.py", 2, "inner"), ("/b.py", 3, "outer"), title="Current thread 0x2 (most recent call first):")
        )
        self.assertEqual(
            hang.main_thread(stacks),
            [{"file": "/b.py", "line": "2", "function": "inner"}, {"file": "/b.py", "line": "3", "function": "outer"}],
        )

    def test_the_signal_may_have_interrupted_another_thread(self):
        stacks = (
            stack(("/a.py", 1, "worker"))
            + "\n"
            + stack(("/b.py", 2, "main"), title="Thread 0x2 [python] (most recent call first):")
        )
        self.assertEqual(hang.main_thread(stacks), [{"file": "/b.py", "line": "2", "function": "main"}])

    def test_unusual_names(self):
        stacks = stack(('/my "own"/test, line 3 in x.py', 7, "<lambda>"))
        self.assertEqual(
            hang.main_thread(stacks), [{"file": '/my "own"/test, line 3 in x.py', "line": "7", "function": "<lambda>"}]
        )


class TestTidy(unittest.TestCase):
    OURS = (
        (PACKAGE / "_testing" / "bases" / "multi_process.py", 300, "run_test"),
        (PACKAGE / "launch" / "in_rank.py", 105, "_run"),
        (PACKAGE / "launch" / "in_rank.py", 80, "run_and_exit"),
        (PACKAGE / "launch" / "fork_server.py", 240, "_start"),
        ("/usr/lib/python3.11/unittest/main.py", 102, "__init__"),
    )

    def test_frames_below_the_test_are_removed(self):
        before = stack(("/usr/lib/python3.11/threading.py", 1, "wait"), (TEST, 12, "test_x"), *self.OURS)
        after = stack(("/usr/lib/python3.11/threading.py", 1, "wait"), (TEST, 12, "test_x"))
        self.assertEqual(hang.without_harness(before), after.rstrip())

    def test_harness_frames_above_the_test_are_kept(self):
        frames = [(PACKAGE / "common_distributed.py", 5, "wrapper"), (TEST, 12, "test_x")]
        self.assertEqual(hang.without_harness(stack(*frames, *self.OURS)), stack(*frames).rstrip())

    def test_the_answering_thread_is_removed(self):
        answering = stack(
            (PACKAGE / "launch" / "in_rank.py", 215, "_answer"), title="Thread 0x1 (most recent call first):"
        )
        own = stack(("/home/me/loader.py", 5, "load"), title="Thread 0x2 (most recent call first):")
        main = stack((TEST, 12, "test_x"), *self.OURS)
        self.assertEqual(
            hang.without_harness("\n".join([answering, own, main])), own + "\n" + stack((TEST, 12, "test_x")).rstrip()
        )

    def test_a_package_of_the_same_name_elsewhere_is_kept(self):
        dump = stack(("/home/me/torch_testing_ext/launch/in_rank.py", 5, "_run"), (TEST, 12, "test_x"))
        self.assertEqual(hang.without_harness(dump), dump.rstrip())

    def test_what_acts_before_an_abort_is_removed(self):
        """faulthandler dumps the stack below the handler of C++'s exceptions."""
        handler = [(system.__file__, 98, "call"), (system.__file__, 97, "call")]
        dump = stack(*handler, ("/torch/distributed_c10d.py", 2169, "new_group"), (TEST, 12, "test_x"))
        expected = stack(("/torch/distributed_c10d.py", 2169, "new_group"), (TEST, 12, "test_x"))
        self.assertEqual(hang.without_harness(dump), expected.rstrip())

    def test_an_empty_dump(self):
        self.assertEqual(hang.without_harness(""), "")
        self.assertEqual(hang.without_harness("\n"), "")

    def test_a_rank_stuck_before_its_test(self):
        """With only harness frames the result is empty."""
        self.assertEqual(hang.without_harness(stack(*self.OURS)), "")

    def test_frames_of_unittest_between_the_harness_and_the_test_are_removed(self):
        unittests = [
            (Path(unittest.__file__).with_name(f"{name}.py"), 5, "run") for name in ("case", "async_case", "mock")
        ]
        ours = (PACKAGE / "_testing" / "bases" / "test_case.py", 9, "run")
        worker = (PACKAGE / "runner" / "processes" / "worker.py", 100, "_run_suite")
        test = ((TEST, 12, "helper"), (unittests[0][0], 700, "assertRaises"), (TEST, 15, "test_x"))
        dump = stack(*test, *unittests, ours, unittests[0], worker, ("/preloaded_server.py", 1, "main"))
        self.assertEqual(hang.without_harness(dump), stack(*test).rstrip())

    def test_unittest_itself_hangs(self):
        frames = [(Path(unittest.__file__).with_name("suite.py"), 5, "run")] * 2
        self.assertEqual(hang.without_harness(stack(*frames)), stack(*frames).rstrip())

    def test_a_package_named_unittest_elsewhere_is_kept(self):
        dump = stack((TEST, 12, "test_x"), ("/home/me/unittest/case.py", 5, "run"))
        self.assertEqual(hang.without_harness(dump), dump.rstrip())

    def test_a_title_of_python_3_14(self):
        title = "Thread 0x00007f [python3.14] (most recent call first):"
        dump = stack((TEST, 12, "test_x"), *self.OURS, title=title)
        self.assertEqual(hang.without_harness(dump), stack((TEST, 12, "test_x"), title=title).rstrip())


class SourceTest(unittest.TestCase):
    def test_the_encoding_is_that_of_the_first_lines(self):
        sources = {
            b"# coding: latin-1\nMARK = '\xfc'\n": "# coding: latin-1\nMARK = '\u00fc'\n",
            b"\xef\xbb\xbfMARK = '\xc3\xbc'\n": "MARK = '\u00fc'\n",
            b"# coding: nonsense\n": "# coding: nonsense\n",
            b"MARK = '\xff'\n": "MARK = '\ufffd'\n",
        }
        with tempfile.NamedTemporaryFile() as file:
            for source, text in sources.items():
                Path(file.name).write_bytes(source)
                self.assertEqual(source_text(file.name), text)
        self.assertEqual(source_text(file.name), "")


if __name__ == "__main__":
    run_tests()

"""Tests where hung ranks are and which one differs, with recorder entries and stacks made by hand."""

import json
import pickle
import tempfile
import unittest
from pathlib import Path

import torch_testing_ext
from torch_testing_ext.common_utils import run_tests
from torch_testing_ext.launch import Case, Outcome, RankEnding, RankReport, hang, judge

PACKAGE = Path(torch_testing_ext.__file__).parent
TEST = "/home/me/test_thing.py"


def entry(kind, sequence, shape=(4,), group="0", record=None, **more):
    """One entry of the flight recorder, in torch's format."""
    return {
        "record_id": sequence if record is None else record,
        "collective_seq_id": sequence,
        "profiling_name": f"gloo:{kind}",
        "input_sizes": [list(shape)],
        "process_group": [group, "default_pg" if group == "0" else "undefined"],
        "is_p2p": False,
        "time_created_ns": 1,
        **more,
    }


def recorded(*entries):
    return json.dumps({"version": "2.10", "entries": list(entries)})


def p2p(record):
    return entry("send 0->1", 0, record=record, is_p2p=True, p2p_seq_id=1)


def running(rank, recorder="", stacks=""):
    return RankReport(rank, RankEnding.STOPPED, 1.0, recorder=recorder, stacks=stacks)


def stack(*frames, title="Current thread 0x00007f (most recent call first):"):
    """A faulthandler dump of one thread; frames are (file, line, name), innermost first."""
    return (
        "\n".join([title, *(f'  File "{file}", line {line} in {function}' for file, line, function in frames)]) + "\n"
    )


def differences(*recorders):
    """The sentences about ranks with these recordings; None for a rank that is no longer running and left none."""
    reports = [
        RankReport(rank, RankEnding.PASSED) if text is None else running(rank, text)
        for rank, text in enumerate(recorders)
    ]
    lines = hang.explain(reports, TEST).splitlines()
    return [line[3:] for line in lines if line.startswith("=> ")]


class TestDifferences(unittest.TestCase):
    def test_no_difference(self):
        same = recorded(entry("all_reduce", 1), entry("all_gather", 2))
        self.assertEqual(differences(same, same, same), [])

    def test_another_kind(self):
        others, one = (recorded(entry("all_reduce", 1), entry(kind, 2)) for kind in ("all_reduce", "all_gather"))
        self.assertEqual(
            differences(others, others, one, others),
            ["rank 2 is at all_gather #2 [4], ranks 0, 1, 3 are at all_reduce #2 [4]"],
        )

    def test_another_shape(self):
        others, one = (recorded(entry("all_reduce", 2, shape)) for shape in ((4,), (6,)))
        self.assertEqual(differences(one, others), ["rank 0 is at all_reduce #2 [6], rank 1 is at all_reduce #2 [4]"])

    def test_several_inputs(self):
        two = recorded(entry("allgather_coalesced", 1, input_sizes=[[4], [2, 3]]))
        one = recorded(entry("allgather_coalesced", 1, input_sizes=[[4]]))
        self.assertIn("rank 1 is at allgather_coalesced #1 [4] [2, 3]", differences(one, two, one)[0])

    def test_smaller_groups_come_first(self):
        kinds = ["barrier", "all_reduce", "barrier", "broadcast", "barrier", "all_reduce"]
        (sentence,) = differences(*(recorded(entry(kind, 5)) for kind in kinds))
        self.assertEqual(
            sentence,
            "rank 3 is at broadcast #5 [4], ranks 1, 5 are at all_reduce #5 [4], ranks 0, 2, 4 are at barrier #5 [4]",
        )

    def test_a_rank_that_stayed_behind(self):
        ahead = recorded(entry("all_reduce", 1), entry("all_reduce", 2))
        behind = recorded(entry("all_reduce", 1))
        self.assertEqual(differences(ahead, ahead, ahead, behind), ["rank 3 never reached all_reduce #2 [4]"])
        self.assertEqual(differences(behind, ahead, behind), ["ranks 0, 2 never reached all_reduce #2 [4]"])

    def test_a_rank_that_never_began(self):
        nothing = recorded()
        self.assertEqual(
            differences(recorded(entry("all_reduce", 1)), nothing), ["rank 1 never reached all_reduce #1 [4]"]
        )

    def test_a_disagreement_is_the_cause_of_lagging_behind(self):
        ranks = [recorded(entry(kind, 2)) for kind in ("all_reduce", "all_reduce", "barrier")]
        self.assertEqual(
            differences(*ranks, recorded(entry("all_reduce", 1))),
            ["rank 2 is at barrier #2 [4], ranks 0, 1 are at all_reduce #2 [4]"],
        )

    def test_the_first_disagreement_is_the_cause(self):
        """Some ranks have continued after it and are elsewhere."""
        one = recorded(entry("all_reduce", 1), entry("all_reduce", 2, (6,)))
        others = recorded(entry("all_reduce", 1), entry("all_reduce", 2), entry("barrier", 3, ()))
        self.assertEqual(
            differences(others, one, others), ["rank 1 was at all_reduce #2 [6], ranks 0, 2 were at all_reduce #2 [4]"]
        )

    def test_shapes_may_differ_where_the_collective_allows_it(self):
        for kind in ("all_to_all", "gather", "scatter"):
            self.assertEqual(differences(recorded(entry(kind, 1, (3,))), recorded(entry(kind, 1, (5,)))), [], kind)

    def test_shapes_must_be_equal(self):
        for kind in (
            "all_reduce",
            "allreduce_coalesced",
            "broadcast",
            "all_gather",
            "_allgather_base",
            "reduce_scatter",
        ):
            self.assertEqual(len(differences(recorded(entry(kind, 1, (3,))), recorded(entry(kind, 1, (5,))))), 1, kind)

    def test_a_rank_that_did_not_answer_is_not_blamed(self):
        """It may hold the GIL; the collectives that it enqueued are unknown."""
        text = recorded(entry("all_reduce", 1))
        self.assertEqual(differences(text, "", text), [])
        self.assertEqual(differences(text, "{broken", text), [])

    def test_a_rank_that_ended_is_not_blamed(self):
        self.assertEqual(differences(recorded(entry("all_reduce", 1)), None, recorded(entry("all_reduce", 1))), [])

    def test_a_single_running_rank_does_not_differ(self):
        self.assertEqual(differences(recorded(entry("all_reduce", 1)), None), [])

    def test_no_running_rank(self):
        self.assertEqual(differences(None, None), [])

    def test_a_ranks_order_over_all_groups(self):
        """Each group has its own sequence numbers: record ids show which collective came last."""
        text = recorded(entry("broadcast", 1, group="1", record=8), entry("all_reduce", 7, group="0", record=7))
        self.assertEqual([str(one) for one in hang.collectives(text)], ["all_reduce #7 [4]", "broadcast #1 [4]"])

    def test_each_group_by_itself(self):
        """Two pairs at different collectives: neither pair is behind the other."""
        first = recorded(entry("all_reduce", 1, group="1"))
        second = recorded(entry("all_gather", 9, group="2"))
        self.assertEqual(differences(first, second, first, second), [])

    def test_a_difference_within_one_of_the_groups(self):
        first = recorded(entry("all_reduce", 1, group="1"))
        third = recorded(entry("all_reduce", 1, (5,), group="1"))
        second = recorded(entry("all_gather", 9, group="2"))
        self.assertEqual(
            differences(first, second, third, second),
            ["rank 0 is at all_reduce #1 [4], rank 2 is at all_reduce #1 [5]"],
        )

    def test_with_several_groups_a_rank_without_collectives_is_not_blamed(self):
        """It is unknown which of the groups the rank belongs to."""
        self.assertEqual(
            differences(recorded(entry("barrier", 1, group="1")), recorded(entry("barrier", 1, group="2")), recorded()),
            [],
        )

    def test_point_to_point_is_not_a_collective(self):
        text = recorded(entry("all_reduce", 1, record=1), p2p(record=2))
        self.assertEqual([str(one) for one in hang.collectives(text)], ["all_reduce #1 [4]"])
        self.assertEqual(hang.collectives(recorded(p2p(record=1))), [])


class TestRecorder(unittest.TestCase):
    def test_invalid_recordings(self):
        """The result is None: an empty list would mean that the rank has reached no collective."""
        whole = recorded(entry("all_reduce", 1))
        for text in ("", "{", "{}", "\0", whole[:-10], whole + "}"):
            with self.subTest(text=text):
                self.assertIsNone(hang.collectives(text))

    def test_an_entry_with_gaps(self):
        (collective,) = hang.collectives('{"entries": [{}]}')
        self.assertEqual((collective.group, collective.sequence, collective.order), ("?", 0, 0))

    def test_an_entry(self):
        (collective,) = hang.collectives(recorded(entry("all_reduce", 3, (2, 5), group="7", record=12)))
        self.assertEqual(collective, hang.Collective("7", 3, "all_reduce", "[2, 5]", 12))
        self.assertEqual(str(collective), "all_reduce #3 [2, 5]")

    def test_a_barrier_has_no_shape(self):
        (collective,) = hang.collectives(recorded(entry("barrier", 3, input_sizes=[])))
        self.assertEqual(str(collective), "barrier #3")

    def test_a_real_recording(self):
        """Torch's own recordings have the format that is used above."""
        import torch
        import torch.distributed as dist

        from torch_testing_ext import _torch

        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        try:
            dist.all_reduce(torch.ones(3, 2))
            dist.broadcast(torch.ones(5), 0)
            ((_, data), *_) = _torch.recorded_collectives()
            text = json.dumps({"entries": pickle.loads(data)["entries"]})
        finally:
            dist.destroy_process_group()
        latest = hang.collectives(text)[-2:]  # earlier groups of this process may have left more entries
        self.assertEqual([str(one) for one in latest], ["all_reduce #1 [3, 2]", "broadcast #2 [5]"])


def over(rank, recorder):
    """A persistent rank or a thread that has finished its test."""
    return RankReport(rank, RankEnding.PASSED, recorder=recorder)


class TestTitle(unittest.TestCase):
    """The first line of a verdict, which all reports show, names the culprit."""

    def title(self, *reports, culprit):
        verdict = judge(reports, True, Case("T.test_x"))
        self.assertEqual((verdict.outcome, verdict.culprit), (Outcome.TIMEOUT, culprit))
        return verdict.message.partition("\n")[0].partition("; ")[2]

    def test_a_rank_that_lags_behind(self):
        ahead, behind = (
            running(rank, recorded(*(entry("all_reduce", n) for n in range(1, 3 - rank)))) for rank in (0, 1)
        )
        self.assertEqual(
            self.title(ahead, behind, culprit=1),
            "ranks 0, 1 of 2 still running: rank 1 never reached all_reduce #2 [4]",
        )

    def test_ranks_that_disagree(self):
        kinds = ("all_reduce", "all_reduce", "all_gather")
        reports = [running(rank, recorded(entry(kind, 1))) for rank, kind in enumerate(kinds)]
        self.assertIn("running: rank 2 is at all_gather #1 [4], ranks 0, 1 are at", self.title(*reports, culprit=2))

    def test_a_rank_that_is_over(self):
        self.assertEqual(
            self.title(over(0, recorded()), running(1, recorded(entry("all_reduce", 1, group="0"))), culprit=0),
            "rank 1 of 2 still running: rank 0 never reached all_reduce #1 [4]",
        )

    def test_a_rank_that_is_over_and_not_in_the_group(self):
        title = self.title(over(0, recorded()), running(1, recorded(entry("all_reduce", 1, group="7"))), culprit=1)
        self.assertEqual(title, "rank 1 of 2 still running")

    def test_nothing_known(self):
        self.assertEqual(self.title(running(0, ""), running(1, ""), culprit=0), "ranks 0, 1 of 2 still running")


class TestExplain(unittest.TestCase):
    def test_a_line_for_each_running_rank(self):
        reports = [
            running(0, recorded(entry("all_reduce", 2)), stack((TEST, 12, "test_x"))),
            RankReport(1, RankEnding.ERROR, 1.0),
            running(2, recorded(), stack((TEST, 10, "test_x"))),
            running(3, "", ""),
        ]
        self.assertEqual(
            hang.explain(reports, TEST),
            """\
where the running ranks are:
  rank 0: test_thing.py:12 in test_x; last collective: all_reduce #2 [4]
  rank 2: test_thing.py:10 in test_x; no collective yet
  rank 3: place unknown; its collectives are not known (it did not answer)
=> rank 2 never reached all_reduce #2 [4]""",
        )


class TestWhere(unittest.TestCase):
    GLOO = ("/usr/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py", 2810, "all_reduce")

    def test_the_innermost_frame_in_the_tests_file(self):
        stacks = stack(self.GLOO, (TEST, 30, "helper"), (TEST, 12, "test_x"))
        self.assertEqual(hang.where(stacks, TEST), "test_thing.py:30 in helper")

    def test_without_one_the_innermost_frame_of_user_code(self):
        stacks = stack(self.GLOO, ("/home/me/model.py", 3, "forward"), ("/home/me/train.py", 9, "step"))
        self.assertEqual(hang.where(stacks, TEST), "model.py:3 in forward")

    def test_without_one_the_innermost_frame_of_all(self):
        stacks = stack(self.GLOO, (str(PACKAGE / "_cases" / "multi_process.py"), 9, "run_test"))
        self.assertEqual(hang.where(stacks, TEST), "distributed_c10d.py:2810 in all_reduce")

    def test_the_standard_library_is_a_library(self):
        stacks = stack(("/usr/lib/python3.11/threading.py", 320, "wait"), ("/home/me/model.py", 3, "forward"))
        self.assertEqual(hang.where(stacks, ""), "model.py:3 in forward")

    def test_a_users_directory_may_have_the_name_of_the_package(self):
        """A user's test of torch_testing_ext does not belong to torch_testing_ext."""
        stacks = stack(("/home/me/test/torch_testing_ext/support.py", 3, "hang"), ("/home/me/run.py", 1, "main"))
        self.assertEqual(hang.where(stacks, TEST), "support.py:3 in hang")

    def test_the_source_line_is_shown(self):
        with tempfile.TemporaryDirectory() as directory:
            file = Path(directory, "test_real.py")
            file.write_text("def test_x():\n    dist.all_reduce(t)  # \u00e9\n", encoding="latin-1")
            stacks = stack((file, 2, "test_x"))
            self.assertEqual(
                hang.where(stacks, str(file)).partition("  #")[0], "test_real.py:2 in test_x (dist.all_reduce(t)"
            )
            self.assertEqual(hang.where(stack((file, 9, "test_x")), str(file)), "test_real.py:9 in test_x")

    def test_nothing_known(self):
        for stacks in (
            "",
            "\n",
            "Fatal Python error: Segmentation fault\n",
            "Current thread 0x1 (most recent call first):\n",
        ):
            with self.subTest(stacks=stacks):
                self.assertEqual(hang.where(stacks, TEST), "place unknown")

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
        (PACKAGE / "_cases" / "multi_process.py", 300, "run_test"),
        (PACKAGE / "launch" / "rank.py", 105, "_run"),
        (PACKAGE / "launch" / "rank.py", 80, "run_and_exit"),
        (PACKAGE / "launch" / "fork_server.py", 240, "_start"),
        ("/usr/lib/python3.11/unittest/main.py", 102, "__init__"),
    )

    def test_frames_below_the_test_are_removed(self):
        before = stack(("/usr/lib/python3.11/threading.py", 1, "wait"), (TEST, 12, "test_x"), *self.OURS)
        after = stack(("/usr/lib/python3.11/threading.py", 1, "wait"), (TEST, 12, "test_x"))
        self.assertEqual(hang.tidy(before), after.rstrip())

    def test_harness_frames_above_the_test_are_kept(self):
        frames = [(PACKAGE / "common_distributed.py", 5, "wrapper"), (TEST, 12, "test_x")]
        self.assertEqual(hang.tidy(stack(*frames, *self.OURS)), stack(*frames).rstrip())

    def test_the_answering_thread_is_removed(self):
        answering = stack(
            (PACKAGE / "launch" / "rank.py", 215, "_answer"), title="Thread 0x1 (most recent call first):"
        )
        own = stack(("/home/me/loader.py", 5, "load"), title="Thread 0x2 (most recent call first):")
        main = stack((TEST, 12, "test_x"), *self.OURS)
        self.assertEqual(
            hang.tidy("\n".join([answering, own, main])), own + "\n" + stack((TEST, 12, "test_x")).rstrip()
        )

    def test_a_package_of_the_same_name_elsewhere_is_kept(self):
        dump = stack(("/home/me/torch_testing_ext/launch/rank.py", 5, "_run"), (TEST, 12, "test_x"))
        self.assertEqual(hang.tidy(dump), dump.rstrip())

    def test_an_empty_dump(self):
        self.assertEqual(hang.tidy(""), "")
        self.assertEqual(hang.tidy("\n"), "")

    def test_a_rank_stuck_before_its_test(self):
        """With only harness frames the result is empty."""
        self.assertEqual(hang.tidy(stack(*self.OURS)), "")

    def test_frames_of_unittest_between_the_harness_and_the_test_are_removed(self):
        unittests = [
            (Path(unittest.__file__).with_name(f"{name}.py"), 5, "run") for name in ("case", "async_case", "mock")
        ]
        ours = (PACKAGE / "_cases" / "test_case.py", 9, "run")
        worker = (PACKAGE / "runner" / "processes" / "worker.py", 100, "_run_suite")
        test = ((TEST, 12, "helper"), (unittests[0][0], 700, "assertRaises"), (TEST, 15, "test_x"))
        dump = stack(*test, *unittests, ours, unittests[0], worker, ("/zygote.py", 1, "main"))
        self.assertEqual(hang.tidy(dump), stack(*test).rstrip())

    def test_unittest_itself_hangs(self):
        frames = [(Path(unittest.__file__).with_name("suite.py"), 5, "run")] * 2
        self.assertEqual(hang.tidy(stack(*frames)), stack(*frames).rstrip())

    def test_a_package_named_unittest_elsewhere_is_kept(self):
        dump = stack((TEST, 12, "test_x"), ("/home/me/unittest/case.py", 5, "run"))
        self.assertEqual(hang.tidy(dump), dump.rstrip())

    def test_a_title_of_python_3_14(self):
        title = "Thread 0x00007f [python3.14] (most recent call first):"
        dump = stack((TEST, 12, "test_x"), *self.OURS, title=title)
        self.assertEqual(hang.tidy(dump), stack((TEST, 12, "test_x"), title=title).rstrip())


if __name__ == "__main__":
    run_tests()

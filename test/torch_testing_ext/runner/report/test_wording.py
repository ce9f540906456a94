"""A change of wording changes no report: with every sentence in capitals, ranks, calls, lines and numbers remain."""

import dataclasses
import json
import tempfile
import unittest
import xml.etree.ElementTree as ET
from contextlib import ExitStack
from pathlib import Path
from unittest import mock

from kit.invented_runs import attempt, history_of, run_events, send
from kit.verdicts import CASE, killed, stopped, world

from torch_testing_ext._collectives.failure import FailureView
from torch_testing_ext._collectives.findings.finding import Doing, Finding, FindingKind
from torch_testing_ext._process import messages
from torch_testing_ext._process.code_sites import Site
from torch_testing_ext._tests.outcomes import TestOutcome
from torch_testing_ext.common_utils import run_tests
from torch_testing_ext.launch import failure_rows, failure_verdicts, failure_views, judging, time_outs
from torch_testing_ext.runner.model import DeviceMemory, FinishedTest, Policy
from torch_testing_ext.runner.options import Options
from torch_testing_ext.runner.report import brief_failures, github, journal, journal_reader, journal_writer, junit, show
from torch_testing_ext.runner.report.console_layout import ConsoleLayout
from torch_testing_ext.runner.report.page import html_page

COMPOSED_BY_JUDGE = ("_what_happened", "describe_exit", "list_of", "of_all")
COMPOSED_FOR_THE_ACCOUNT = ("_compose", "_line", "list_of")
COMPOSED_OF_A_TIME_OUT = ("list_of", "of_all")
COMPOSED_OF_ROWS = ("_did", "_still_running")
COMPOSED_FOR_THE_SCREEN = ("_remarks",)


def in_capitals(value):
    if isinstance(value, str):
        return value.upper()
    if isinstance(value, Site) or value is None:
        return value
    if isinstance(value, tuple):
        return tuple(map(in_capitals, value))
    return [in_capitals(one) for one in value]


def deadlock(sentence="rank 0 waits for rank 1, which waits for rank 0"):
    """Ranks 0 and 1 wait for each other; rank 2 has nothing to do with it."""
    lines = tuple(
        Doing(rank, f"waiting for rank {1 - rank}".upper(), Site(__file__, 20 + rank, "test_x"), (1 - rank,), call)
        for rank, call in enumerate(("all_reduce #1 of group dp", "barrier #2"))
    )
    return Finding(FindingKind.DEADLOCK, sentence.upper(), lines, (0, 1))


class WordingTest(unittest.TestCase):
    def setUp(self):
        patches = ExitStack()
        self.addCleanup(patches.close)
        for module, names in (
            (judging, COMPOSED_BY_JUDGE),
            (failure_verdicts, COMPOSED_FOR_THE_ACCOUNT),
            (time_outs, COMPOSED_OF_A_TIME_OUT),
            (failure_rows, COMPOSED_OF_ROWS),
            (failure_views, COMPOSED_FOR_THE_SCREEN),
        ):
            for name in names:
                function = getattr(module, name)

                def call(*args, function=function, **options):
                    return in_capitals(function(*args, **options))

                patches.enter_context(mock.patch.object(module, name, call))
        case = dataclasses.replace(CASE, file=__file__, show_command="show it")
        view = judging.judge(world(stopped(), stopped(), stopped()), False, case, finding=deadlock()).failure
        self.assertEqual(view.title, view.title.upper())
        self.hung = self.sent(view)
        crash = judging.judge(world(killed(9), stopped()), False, case).failure
        self.assertTrue(crash.title.startswith("RANK 0 OF 2 WAS KILLED BY SIGKILL"), crash.title)
        self.crashed = self.sent(crash)
        self.finished = [
            self.failing("test_hangs", TestOutcome.TIMEOUT, self.hung),
            self.failing("test_crashes", TestOutcome.CRASHED, self.crashed),
        ]

    def sent(self, view):
        """The view as it comes from another process."""
        return messages.from_json(messages.to_json(view), messages.by_name(type(view)))

    def failing(self, name, outcome, view):
        return FinishedTest((attempt(name, outcome, message="", failure=view),))

    def test_the_page_and_the_wait_graph(self):
        page = html_page.render_page(history_of(self.finished))
        for row in ("rank 0", "rank 1"):
            self.assertIn(f'<th scope="row">{row}</th>', page)
        for place in ("test_wording.py:20 in test_x", "test_wording.py:21 in test_x"):
            self.assertIn(f'<td class="place">{place}</td>', page)
        self.assertIn('<span class="culprit"><i>   20  </i>', page)
        self.assertEqual(page.count('class="wait-graph"'), 1)
        for words in ("all_reduce #1 of group dp, test_wording.py:20", "barrier #2, test_wording.py:21"):
            self.assertIn(words, page)

    def test_junit(self):
        root = ET.fromstring(junit.render_junit(history_of(self.finished)))
        failures = [(one.get("type"), one.get("message")) for one in root.iter("failure")]
        self.assertEqual(failures, [("timeout", self.hung.title), ("crashed", self.crashed.title)])

    def test_one_screen(self):
        lines = brief_failures.brief_details(self.finished[0].last, ConsoleLayout(show="python run_test.py show"))
        plain = brief_failures.plain(lines)
        self.assertIn("  rank 0  WAITING FOR RANK 1  test_wording.py:20 in test_x\n", plain)
        self.assertRegex(plain, r"\n  > +20 \| ")
        self.assertIn("details:    python run_test.py show test/distributed/test_example.py::Exa", plain)
        self.assertIn(f"run again:  {CASE.rerun_command}", plain)

    def test_show_reads_the_journal(self):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, journal.NAME)
            send(journal_writer.Journal(path, journal.header_of(Options()), self.fail), run_events(self.finished))
            hung, crashed = accounts_in(path)
        self.assertIn(self.hung.account, hung)
        self.assertIn(self.crashed.account, crashed)

    def test_causes_and_lines_of_annotations(self):
        alike = [self.failing(f"test_{number}", TestOutcome.TIMEOUT, self.hung) for number in range(2)]
        (group,) = brief_failures.by_cause(alike, Policy())
        self.assertEqual(len(group), 2)
        file = dataclasses.replace(alike[0].test.id, file=f"x/{Path(__file__).name}")
        one = FinishedTest((attempt("", TestOutcome.TIMEOUT, message="", failure=self.hung, test=self.of_file(file)),))
        self.assertIn(",line=20,", github.annotation([one], Policy()))

    def of_file(self, name):
        return dataclasses.replace(self.finished[0].test, id=name)


def accounts_in(journal_of_run):
    """All that `show` says of a run."""
    return list(show.accounts_of_failures(show.known_runs([journal_of_run]), [], Path(), Path()))


def attempts_in(record):
    """The attempts in a record of a journal, as JSON."""
    match record:
        case {"AttemptEnded": {"attempt": written}}:
            return [written]
        case {"TestFinished": {"finished": {"attempts": several}}}:
            return several
    return []


class OldJournalTest(unittest.TestCase):
    def journal_of(self, finished, number, without=()):
        """The journal of a run in an older format. `without`: fields that an attempt did not have."""
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        path = Path(folder.name, journal.NAME)
        send(journal_writer.Journal(path, journal.header_of(Options()), self.fail), run_events([finished]))
        header, *records = map(json.loads, path.read_text().splitlines())
        header["JournalHeader"]["format"] = f"torch_testing_ext journal {number}"
        for record in records:
            for written in attempts_in(record):
                written.update(written.pop("end"))
                for field in without:
                    del written[field]
        path.write_text("".join(f"{json.dumps(record)}\n" for record in (header, *records)))
        return path

    def test_failures_are_texts(self):
        old = FinishedTest((attempt("test_a", TestOutcome.FAILED, message="1 != 2\n\nmore"),))
        path = self.journal_of(old, 2, without=("failure", "reason"))
        run = journal_reader.read_journal(path)
        (shown,) = accounts_in(path)
        self.assertEqual((run.summary.error, run.summary.finished[0].last.said), ("", "1 != 2\n\nmore"))
        self.assertIn("\n1 != 2\n\nmore\n", shown)

    def test_an_attempt_has_the_fields_of_its_end(self):
        failure = FailureView("1 != 2", account="1 != 2\n\nmore")
        facts = {"leftovers": ("pid 7: cat",), "want": "2 devices", "memory": DeviceMemory(1, 2)}
        old = FinishedTest((attempt("test_a", TestOutcome.FAILED, message="", failure=failure, **facts),))
        run = journal_reader.read_journal(self.journal_of(old, 3))
        self.assertEqual((run.summary.error, run.summary.finished), ("", (old,)))


if __name__ == "__main__":
    run_tests()

"""A finished result is never lost: whatever ends a run, its reports are written, and it is not green by mistake."""

import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
import unittest

import pytest
from kit.junit import read_junit
from kit.processes import clean_environ
from kit.runs import REPORTS, RunsCase

PASSES_AND_WAITS = """
import os, time, unittest
class T(unittest.TestCase):
    def test_a_fails(self): self.fail("on purpose")
    def test_b_passes(self): pass
    def test_c_waits(self):
        open("fifo", "w").close()
        time.sleep(1000)
    def test_d_never(self): pass
"""
SIMPLE = """
import unittest
class T(unittest.TestCase):
    def test_a(self): pass
    def test_b(self): pass
"""
FILE = "test/distributed/test_x.py"


class WaysOutCase(RunsCase):
    def check_all_reports(self, **outcomes):
        """All reports exist, and agree on the outcomes of these tests."""
        self.assertEqual(self.outcomes(), outcomes)
        cases = {case.get("name"): case for case in read_junit((self.root / "x.xml").read_text()).iter("testcase")}
        for name, outcome in outcomes.items():
            self.assertIn(name, cases)
            kind = None if outcome == "passed" else "error" if outcome == "interrupted" else "failure"
            self.assertEqual([child.tag for child in cases[name] if child.tag != "system-out"], [kind] if kind else [])
        for name in "x.html", "trace.json":
            for test in outcomes:
                if name == "x.html" or test != FILE:  # a file that could not be imported had no slot
                    self.assertIn(test, (self.root / name).read_text())
        return cases


class SignalsTest(WaysOutCase):
    def start_and_wait(self, *options, **more):
        self.write(FILE, PASSES_AND_WAITS)
        os.mkfifo(self.root / "fifo")
        run = self.start("-j1", *options, *REPORTS, **more)
        self.wait_for_writer("fifo", run)
        return run

    def check_interrupted(self, out):
        self.assertEqual(out.splitlines()[-1], "1 passed, 1 failed, 0 skipped")
        cases = self.check_all_reports(test_a_fails="failed", test_b_passes="passed")
        self.assertTrue(self.results()["interrupted"])
        unfinished = {one.rpartition("::")[2] for one in self.results()["unfinished"]}
        self.assertEqual(unfinished, {"test_d_never", "test_c_waits"})
        for name in "test_c_waits", "test_d_never":
            self.assertIsNotNone(cases[name].find("skipped"))
            self.assertIn(name, out)
            self.assertIn(name, (self.root / "x.html").read_text())
        self.assertIsNotNone(cases["the whole run"].find("error"))

    @pytest.mark.slow
    def test_signals(self):
        for number in signal.SIGINT, signal.SIGTERM, signal.SIGHUP:
            with self.subTest(number):
                run = self.start_and_wait()
                run.send_signal(number)
                self.check_interrupted(self.finish(run, 2))
                for name in ("fifo", "x.xml", "x.html", "trace.json", "results.json"):
                    (self.root / name).unlink()

    @pytest.mark.slow
    def test_sighup_stays_ignored_under_nohup(self):
        run = self.start_and_wait(before=("nohup",))
        run.send_signal(signal.SIGHUP)
        run.send_signal(signal.SIGTERM)
        self.check_interrupted(self.finish(run, 2))
        self.assertNotIn("SIGHUP", (self.root / "x.xml").read_text())

    def test_a_test_that_waits_for_its_retry_has_failed(self):
        self.write(
            FILE,
            PASSES_AND_WAITS.replace(
                'self.fail("on purpose")',
                "self.test_c_waits() if os.path.exists('tried') else self.fail(open('tried', 'w').close())",
            ),
        )
        os.mkfifo(self.root / "fifo")
        run = self.start("-j1", "--retries=1", "-k", "fails", *REPORTS)
        self.wait_for_writer("fifo", run)
        run.send_signal(signal.SIGINT)
        out = self.finish(run, 2)
        self.check_all_reports(test_a_fails="failed")
        self.assertEqual(out.splitlines()[-1], "0 passed, 1 failed, 0 skipped")

    def test_a_failure_before_max_fail_is_no_unfinished_test(self):
        self.write(
            FILE,
            "import unittest\nclass T(unittest.TestCase):\n"
            "    def test_a(self): self.fail()\n    def test_b(self): self.fail()\n    def test_c(self): self.fail()\n",
        )
        out = self.finish(self.start("-j1", "--maxfail=1", "--retries=1", *REPORTS), 1)
        found = self.results()
        self.assertEqual(len(found["tests"]) + len(found["unfinished"]), 3, out)

    @pytest.mark.slow
    def test_sigkill_and_then_report(self):
        run = self.start_and_wait()
        run.kill()
        run.wait()
        self.assertFalse((self.root / "x.xml").exists())
        (journal,) = self.journals()
        for place in (), (str(journal),), (str(journal.parent),), (".torch_testing_ext",):
            with self.subTest(place):
                self.check_interrupted(self.finish(self.start("report", *place, *REPORTS), 2))
        self.assertIn("was killed", self.finish(self.start("report"), 2))

    def test_report_while_the_run_goes_on(self):
        run = self.start_and_wait()
        out = self.finish(self.start("report", *REPORTS), 2)
        self.assertIn("the run goes on", out)
        self.check_interrupted(out)
        run.terminate()
        self.finish(run, 2)

    def test_before_the_first_test(self):
        self.write(FILE, "import time\nopen('fifo', 'w').close()\ntime.sleep(600)\n")
        os.mkfifo(self.root / "fifo")
        run = self.start(*REPORTS)
        self.wait_for_writer("fifo", run)
        run.send_signal(signal.SIGTERM)
        out = self.finish(run, 2)
        self.assertIn("interrupted before the first test started", out)
        self.assertEqual(out.splitlines()[-1], "0 passed, 0 failed, 0 skipped")
        self.assertEqual((self.results()["interrupted"], self.results()["unfinished"]), (True, [FILE]))


class ReportTest(WaysOutCase):
    def run_once(self, *options):
        self.write(FILE, PASSES_AND_WAITS.replace("time.sleep(1000)", "pass").replace('open("fifo"', 'open("file"'))
        out = self.finish(self.start(*options), 1)
        return out

    def test_of_a_run_that_ended(self):
        self.run_once()
        out = self.finish(self.start("report", *REPORTS), 1)
        self.assertEqual(out.splitlines()[-1], "3 passed, 1 failed, 0 skipped")
        self.check_all_reports(
            test_a_fails="failed", test_b_passes="passed", test_c_waits="passed", test_d_never="passed"
        )
        self.assertFalse(self.results()["interrupted"])

    @pytest.mark.slow
    def test_the_reports_are_those_of_the_run(self):
        self.run_once("--results", "first.json", "--repeat", "2", "--retries", "1", "--flaky", "fail")
        self.finish(self.start("report", "--results", "second.json"), 1)
        first, second = (json.loads((self.root / name).read_text()) for name in ("first.json", "second.json"))
        self.assertEqual(first, second)

    @pytest.mark.slow
    def test_torn_and_damaged(self):
        self.run_once("-j1")
        (journal,) = self.journals()
        lines = journal.read_bytes().splitlines(keepends=True)
        begins = next(number for number, line in enumerate(lines, 1) if line.startswith(b'{"RunBegan"'))
        for number in range(1, len(lines)):
            with self.subTest(lines=number):
                journal.write_bytes(b"".join(lines[:number]) + lines[number][:-1])
                if number < begins:
                    self.finish(self.start("report"), 4)
                    self.assertIn("ends before its run began", self.stderr)
                else:
                    self.finish(self.start("report", *REPORTS), 2)
                    found = self.results()
                    self.assertEqual(len(found["tests"]) + len(found["unfinished"]), 4)
            if number > begins + 2:
                break
        place = next(number for number, line in enumerate(lines) if line.startswith(b'{"AttemptEnded"'))
        journal.write_bytes(b"".join([*lines[:place], b"{}\n", *lines[place + 1 :]]))
        out = self.finish(self.start("report"), 3)
        self.assertIn(f"damaged: line {place + 1} is not readable; 4 tests finished, it has 3", out)
        journal.write_text("{}\n")
        self.finish(self.start("report"), 4)
        self.assertIn("is not the journal of a run", self.stderr)

    def test_usage(self):
        for words, said in (
            (("report",), "does not exist"),
            (("report", "nowhere"), "does not exist"),
            (("report", "."), "contains no journal.jsonl"),
            (("report", "-k", "x"), "report has no option -k"),
            (("report", "--list"), "report has no option --list"),
        ):
            with self.subTest(words):
                self.finish(self.start(*words), 4)
                self.assertIn(said, self.stderr)

    @pytest.mark.slow
    def test_another_place_and_no_place(self):
        self.run_once("-ojournal=kept/all.jsonl")
        self.assertEqual(self.journals(), [])
        self.finish(self.start("report", "kept"), 1)
        self.finish(self.start("report", "kept/all.jsonl"), 1)
        out = self.run_once("-ojournal=/dev/full/x")
        self.assertIn("no more results are saved there", out)
        out = self.run_once("-ojournal=/dev/full")
        self.assertIn("No space left on device", out)

    def test_old_journals_are_deleted(self):
        self.write(FILE, SIMPLE)
        for number in range(12):
            self.write(f".torch_testing_ext/runs/2020-01-{number:02}/journal.jsonl", "")
        self.write(".torch_testing_ext/runs/2020-01-00/other", "")
        self.finish(self.start(), 0)
        names = [journal.parent.name for journal in self.journals()]
        self.assertEqual(len(names), 11)
        self.assertEqual(names[0], "2020-01-02")
        self.assertTrue((self.root / ".torch_testing_ext/runs/2020-01-00/other").exists())

    def test_git_ignores_them(self):
        self.write(FILE, SIMPLE)
        self.finish(self.start(), 0)
        self.assertEqual((self.root / ".torch_testing_ext/.gitignore").read_text(), "*\n")


class OurErrorsTest(WaysOutCase):
    """An exception in run_test.py itself."""

    def test_in_the_engine(self):
        self.write(FILE, PASSES_AND_WAITS)
        os.mkfifo(self.root / "fifo")
        self.break_by(
            """
from torch_testing_ext.runner.engine import engine
def test_began(self, running, test, before=engine.Engine.test_began):
    before(self, running, test)
    if test.id.method == "test_c_waits":
        raise RuntimeError("a mistake of ours")
engine.Engine.test_began = test_began
"""
        )
        run = self.start("-j1", *REPORTS)
        out = self.finish(run, 3)
        self.assertEqual(out.splitlines()[-1], "1 passed, 1 failed, 0 skipped")
        self.assertIn("a mistake of ours", out)
        self.assertIn("a mistake of ours", self.stderr)
        cases = self.check_all_reports(test_a_fails="failed", test_b_passes="passed")
        self.assertIsNotNone(cases["the whole run"].find("error"))
        self.assertIn("a mistake of ours", self.results()["error"])
        self.assertEqual(len(self.results()["unfinished"]), 2)
        self.finish(self.start("report"), 3)

    @pytest.mark.slow
    def test_in_one_report(self):
        self.write(FILE, SIMPLE)
        reports = (
            ("report.junit", "render_junit", "x.xml"),
            ("report.page.html_page", "render_page", "x.html"),
            ("report.perfetto", "render_perfetto", "trace.json"),
        )
        for module, function, name in reports:
            with self.subTest(function, file=name):
                self.break_by(
                    f"import torch_testing_ext.runner.{module} as module\n"
                    "def broken(*a, **k): raise LookupError('a mistake in a report')\n"
                    f"module.{function} = broken\n"
                )
                for _, report in (word.split("=") for word in REPORTS):
                    (self.root / report).unlink(missing_ok=True)
                out = self.finish(self.start(*REPORTS), 3)
                self.assertEqual(out.splitlines()[-1], "2 passed, 0 failed, 0 skipped")
                self.assertIn("a mistake in a report", self.stderr)
                written = {
                    report for _, report in (word.split("=") for word in REPORTS) if (self.root / report).exists()
                }
                self.assertEqual(written, {"x.xml", "x.html", "trace.json", "results.json"} - {name})

    def test_in_the_console(self):
        self.write(FILE, SIMPLE)
        self.break_by(
            """
from torch_testing_ext.runner.report import console
def broken(*a, **k): raise LookupError("a mistake in the console")
console.Console._test_finished = broken
"""
        )
        out = self.finish(self.start(*REPORTS), 3)
        self.assertEqual(out.splitlines()[-1], "2 passed, 0 failed, 0 skipped")
        self.check_all_reports(test_a="passed", test_b="passed")

    def test_before_the_first_test(self):
        self.write(FILE, SIMPLE)
        self.break_by(
            "from torch_testing_ext.runner import run_site\n"
            "from torch_testing_ext.runner import found_work\n"
            "def plan(*a, **k): raise LookupError('a mistake in the plan')\n"
            "found_work.plan = plan\n"
            "run_site.LocalSite.warnings = ('what the site found before',)\n"
        )
        out = self.finish(self.start(*REPORTS), 3)
        self.assertEqual(out.splitlines()[-1], "0 passed, 1 failed, 0 skipped")
        self.assertEqual(self.outcomes(), {FILE: "error"})
        self.assertIn("a mistake in the plan", (self.root / "x.xml").read_text())
        self.assertEqual(self.results()["warnings"], ["what the site found before"])

    def test_a_preloaded_server_that_cannot_start(self):
        self.write(FILE, SIMPLE)
        self.write("torch.py", "import os; os._exit(9)\n")  # the preloaded server finds it before torch
        out = self.finish(self.start(*REPORTS, cold=True), 3)
        self.assertEqual(out.splitlines()[-1], "0 passed, 1 failed, 0 skipped")
        self.assertIn("exited with code 9", (self.root / "x.xml").read_text())
        self.assertIn("exited with code 9", self.stderr)


class StreamsTest(WaysOutCase):
    """stdout that is closed or breaks: the reports are complete, and the exit code is that of the results."""

    def check(self, run, *codes):
        self.finish(run, *(codes or (0,)))
        self.check_all_reports(test_a="passed", test_b="passed")
        for name in ("x.xml", "x.html", "trace.json", "results.json"):
            (self.root / name).unlink()

    @pytest.mark.slow
    def test_closed_at_the_start(self):
        self.write(FILE, SIMPLE)
        self.check(self.start(*REPORTS, before=["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh"]))
        for closed in ({"stdout": 1}, {"stderr": 2}, {"stdout": 1, "stderr": 2}):
            with self.subTest(closed):
                self.break_by(f"import os\nfor name, fd in {closed}.items(): os.close(fd); setattr(sys, name, None)")
                self.check(self.start(*REPORTS))

    @pytest.mark.slow
    def test_full(self):
        self.write(FILE, SIMPLE)
        with open("/dev/full", "w") as full:
            self.check(self.start(*REPORTS, stdout=full))
            self.assertIn("console output stops here", self.stderr)
            self.check(self.start(*REPORTS, stdout=full, stderr=full))

    def test_a_reader_that_goes_away(self):
        self.write(FILE, SIMPLE)
        run = self.start(*REPORTS)
        run.stdout.readline()
        run.stdout.close()
        run.stdout = None
        self.check(run)
        self.assertEqual(self.stderr, "")

    def test_on_a_terminal_that_is_closed(self):
        self.write(FILE, PASSES_AND_WAITS)
        os.mkfifo(self.root / "fifo")
        terminal, theirs = os.openpty()
        run = self.start("-j1", *REPORTS, stdout=theirs, stderr=theirs, environ={"TERM": "xterm"})
        os.close(theirs)
        self.wait_for_writer("fifo", run)
        os.close(terminal)
        run.send_signal(signal.SIGHUP)
        run.wait()
        self.assertEqual(run.returncode, 2)
        self.check_all_reports(test_a_fails="failed", test_b_passes="passed")

    def test_a_list_that_cannot_be_printed_is_no_success(self):
        self.write(FILE, SIMPLE)
        with open("/dev/full", "w") as full:
            self.finish(self.start("--list", stdout=full), 3)


CLONE_NEWNS = 0x20000  # of unshare(): another namespace for mounts


def may_mount():
    command = ["unshare", "-m", "mount", "-t", "tmpfs", "none", "/mnt"]
    return sys.platform == "linux" and subprocess.run(command, capture_output=True, check=False).returncode == 0


@pytest.mark.slow
@unittest.skipUnless(may_mount(), "mounts a file system of its own, which takes root")
class FullTemporaryFolderTest(WaysOutCase):
    """A file system for temporary files that is full, of bytes or of files."""

    def start_on(self, options, before_run=":"):
        """Start with a file system of its own, which it mounts in a namespace of its own."""
        mount = f'mount --make-rprivate / && mount -t tmpfs -o {options} none "$TMPDIR"'
        self.break_by(
            f"import ctypes, subprocess\n"
            f"assert ctypes.CDLL(None).unshare({CLONE_NEWNS}) == 0\n"
            f"subprocess.run({f'{mount} && {{ {before_run}; }}'!r}, shell=True, check=True)"
        )
        return self.start("-j1", "--warm=off", *REPORTS)

    FILLS = """
import os, tempfile, unittest
class T(unittest.TestCase):
    def test_a_passes(self): pass
    def test_b_fills(self):
        folder = tempfile.gettempdir()
        number = 0
        with self.assertRaises(OSError):
            while True:
                number += 1
                with open(f"{folder}/fill{number}", "wb") as file:
                    SIZE
    def test_c_comes_later(self): pass
    def test_d_prints(self): print("words" * 1000)
"""

    def check_filled(self, out):
        self.assertRegex(out.splitlines()[-1], "^[0-9]+ passed, [0-9]+ failed, 0 skipped$")
        found = self.outcomes()
        self.assertEqual(set(found), {"test_a_passes", "test_b_fills", "test_c_comes_later", "test_d_prints"}, out)
        self.assertEqual((found["test_a_passes"], found["test_b_fills"]), ("passed", "passed"))
        self.check_all_reports(**found)
        return found

    def test_of_bytes(self):
        self.write(FILE, self.FILLS.replace("SIZE", "file.write(bytes(65536))"))
        self.check_filled(self.finish(self.start_on("size=4m"), 0, 1))

    def test_of_files(self):
        self.write(FILE, self.FILLS.replace("SIZE", "pass"))
        self.check_filled(self.finish(self.start_on("nr_inodes=40"), 0, 1))

    @pytest.mark.nightly
    def test_of_files_at_every_step(self):
        """With one more file each time, another step fails first; in the end, none does."""
        self.write(FILE, SIMPLE)
        for files in itertools.count(4):
            with self.subTest(files):
                process = self.start_on(f"nr_inodes={files}")
                out = self.finish(process, 0, 1, 3)
                self.check_all_reports(**self.outcomes())
                if process.returncode == 0:
                    self.assertEqual(out.splitlines()[-1], "2 passed, 0 failed, 0 skipped")
                    break
                self.assertRegex(out.splitlines()[-1], "^[01] passed, [12] failed, 0 skipped$")
                self.assertIn("No space left on device", (self.root / "x.xml").read_text())
            self.assertLess(files, 20)
        self.assertGreater(files, 5)

    def test_from_the_start(self):
        self.write(FILE, SIMPLE)
        fill = 'i=0; while touch "$TMPDIR/$i" 2>/dev/null; do i=$((i+1)); done'
        out = self.finish(self.start_on("nr_inodes=20", before_run=fill), 0, 1, 3)
        self.assertRegex(out.splitlines()[-1], "^[0-9]+ passed, [0-9]+ failed, 0 skipped$")
        self.assertTrue(self.outcomes())


class WorkingFolderTest(WaysOutCase):
    def test_a_deleted_folder(self):
        gone = self.root / "gone"
        gone.mkdir()
        words = (sys.executable, str(self.root / "run_test.py"))
        done = subprocess.run(
            ["sh", "-c", 'cd "$0" && rmdir "$0" && exec "$@"', str(gone), *words],
            env=clean_environ(),
            capture_output=True,
            text=True,
        )
        self.assertEqual(done.returncode, 3, done.stderr)
        self.assertRegex(
            done.stderr, r"^run_test\.py: the working folder cannot be used \(.*\): it was deleted, or .*\n$"
        )

    def test_a_folder_that_a_test_deletes(self):
        """The next one is not run, and says why."""
        self.write(
            FILE,
            "import os, shutil, unittest\nclass T(unittest.TestCase):\n"
            "    def test_a(self): shutil.rmtree(os.getcwd())\n    def test_b(self): pass\n",
        )
        out = self.finish(self.start("-j1", environ={"TMPDIR": tempfile.gettempdir()}), 1)
        self.root.mkdir(exist_ok=True)
        self.assertIn("it was not run: the working folder cannot be used (No such file or directory)", out)
        self.assertEqual(out.splitlines()[-1], "1 passed, 1 failed, 0 skipped")


if __name__ == "__main__":
    unittest.main()

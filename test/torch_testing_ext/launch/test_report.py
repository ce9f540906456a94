"""Tests the account that a rank writes, how it is read, and its combination with the exit status in a report."""

import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import unittest
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import torch.distributed as dist
from kit.files import subject
from kit.verdicts import report_on

import torch_testing_ext
from torch_testing_ext._process import messages
from torch_testing_ext._process.code_sites import Site
from torch_testing_ext._process.fork_host import Exit
from torch_testing_ext._process.logs import cut_middle, tail
from torch_testing_ext._process.signals import signal_name
from torch_testing_ext.common_utils import run_tests
from torch_testing_ext.faults import call, kill
from torch_testing_ext.launch import Cause, RankEnding, RankReport, account_writer
from torch_testing_ext.launch.account_writer import AccountWriter, account_of, related_to, summarize
from torch_testing_ext.launch.accounts import (
    LONGEST_TEXT,
    RESERVED,
    AccountFile,
    OwnWarning,
    RaisedError,
    RankAccount,
    read_account,
)
from torch_testing_ext.launch.rank_reports import assemble_report, report_of
from torch_testing_ext.launch.seen_faults import FaultsSeen, HappenedFault
from torch_testing_ext.launch.start_settings import SHOWLOCALS

PASSED = RankAccount(RankEnding.PASSED, 0.0, 1.0)
HAS_MOUNT_NAMESPACES = sys.platform.startswith("linux") and os.geteuid() == 0 and shutil.which("unshare") is not None


class NoDriverTest(unittest.TestCase):
    """A fork of a process that has asked a build for CUDA for its devices says why, on a machine without a driver."""

    def test_the_cause(self):
        error = RuntimeError("Cannot re-initialize CUDA in forked subprocess. To use CUDA with multiprocessing, ...")
        with mock.patch.object(account_writer, "_NVIDIA_DRIVER", Path("/nowhere")):
            self.assertIn("This machine has no NVIDIA driver", summarize(error))
        with mock.patch.object(account_writer, "_NVIDIA_DRIVER", Path("/")):
            self.assertNotIn("driver", summarize(error))


class LocalVariablesTest(unittest.TestCase):
    """With --showlocals, a failure has the local variables of its functions."""

    def account(self, value):
        def in_test(number):
            other = value
            raise ValueError(f"{number} for {type(other)}")

        try:
            in_test(7)
        except ValueError as error:
            return account_of(error, False, 0.0)
        self.fail("it raised nothing")

    def test_on_demand(self):
        account = self.account("a value")
        self.assertNotIn("number = 7", account.traceback)
        self.assertEqual(account.error.related, ())
        with mock.patch.dict(os.environ, {SHOWLOCALS.name: "1"}):
            account = self.account("a value")
        self.assertEqual(account.error.related, ("number = 7", "other = 'a value'", "value = 'a value'"))
        self.assertIn("\n    other = 'a value'\n", account.traceback)

    def test_values_that_are_long_or_cannot_be_shown(self):
        class Broken:
            def __repr__(self):
                raise RuntimeError("no")

        with mock.patch.dict(os.environ, {SHOWLOCALS.name: "1"}):
            self.assertIn("other = (its repr() raised RuntimeError)", self.account(Broken()).error.related)
            longest = max(map(len, self.account("x" * 9999).error.related))
        self.assertLess(longest, 400)


class ReplacedFunctionsTest(unittest.TestCase):
    """An error that torch raises names the functions of torch that the program has replaced."""

    def related(self, call):
        try:
            call()
        except ValueError as error:
            return related_to(error)
        self.fail("it raised nothing")

    def test_an_error_of_torch(self):
        with mock.patch.object(dist, "is_mpi_available", lambda: False):
            (line,) = self.related(dist.get_world_size)
        self.assertRegex(
            line, rf"^with another torch.distributed.is_mpi_available in this process, from {__file__}:\d+$"
        )
        self.assertEqual(self.related(dist.get_world_size), ())

    def test_the_whole_account_has_them(self):
        with mock.patch.object(dist, "is_mpi_available", lambda: False):
            try:
                dist.get_world_size()
            except ValueError as error:
                account = account_of(error, False, 0.0)
        last, own = account.traceback.splitlines()[-1], account.traceback.splitlines()[-2]
        self.assertTrue(last.startswith("with another torch.distributed.is_mpi_available in this process, from "), last)
        self.assertTrue(own.startswith("ValueError: "), own)

    def test_an_error_of_the_program(self):
        def fail():
            raise ValueError

        with mock.patch.object(dist, "is_mpi_available", lambda: False):
            self.assertEqual(self.related(fail), ())


class InDirectory(unittest.TestCase):
    def setUp(self):
        directory = tempfile.TemporaryDirectory()
        self.addCleanup(directory.cleanup)
        self.directory = Path(directory.name)
        self.file = self.directory / "rank0.account"

    def open_account(self):
        account_file = AccountFile.open(self.file)
        self.addCleanup(account_file.close)
        return account_file

    def round_trip(self, account):
        self.open_account().write(account)
        return read_account(self.file)


class TestAccount(InDirectory):
    def test_round_trip(self):
        for ending in RankEnding:
            account = RankAccount(ending, 1.25, 2.5, "what", "Traceback\n  what\n", 10, ("torch.fx", "torch.onnx"))
            with self.subTest(ending=ending):
                self.assertEqual(self.round_trip(account), account)

    def test_warnings_reach_the_account_before_and_after_it_is_written(self):
        """And the report: a failure of the test keeps those that came before it."""
        early, late = (OwnWarning(text, "builtins.UserWarning", "a.py", 3) for text in ("early", "late"))
        writer = AccountWriter(self.open_account())
        writer.add([early], "extras")
        writer.failed(ValueError("no"), assertion=False)
        writer.add([late])
        account = read_account(self.file)
        self.assertEqual((account.warnings, account.extras), ((early, late), "extras"))
        for status, ending in ((account.code << 8, RankEnding.ERROR), (9, RankEnding.KILLED)):
            report = assemble_report(0, account, Exit(status, account.ended), 0.0, None)
            self.assertEqual((report.ending, report.account), (ending, account))

    def test_a_closed_descriptor_costs_no_warning(self):
        early, late = (OwnWarning(text, "builtins.UserWarning", "test_x.py", 3) for text in ("early", "late"))
        file = self.open_account()
        writer = AccountWriter(file)
        writer.add([early])
        writer.failed(ValueError("no"), assertion=False)
        os.close(file.fd)
        writer.add([late], "extras")
        account = read_account(self.file)
        self.assertIn("closed file descriptors", account.summary)
        self.assertIn("ValueError: no", account.traceback)
        self.assertEqual((account.warnings, account.extras), ((early, late), "extras"))

    def test_texts_of_all_kinds(self):
        for text in ("", "\0", "\x1b[1m", "na\u00efve \u4e16\u754c \U0001f600", "\ud800 alone", "a\r\nb\u2028c", '"\\'):
            with self.subTest(text=text):
                account = RankAccount(RankEnding.ERROR, 0.0, 0.0, text, text)
                self.assertEqual(self.round_trip(account), account)

    def test_a_thread_that_cannot_be_started(self):
        """The errors of C++ and of Python name no limit."""
        for text in ("Resource temporarily unavailable", "can't start new thread"):
            self.assertRegex(
                summarize(RuntimeError(text)), f"^RuntimeError: {text}. The limit of processes and threads "
            )
        self.assertEqual(summarize(RuntimeError("Resource")), "RuntimeError: Resource")

    def test_a_variable_that_gloo_does_not_name(self):
        with mock.patch.dict(os.environ, GLOO_SOCKET_IFNAME="missing0"), self.assertRaises(RuntimeError) as raised:
            dist.ProcessGroupGloo.create_device(interface="missing0")
        with mock.patch.dict(os.environ, GLOO_SOCKET_IFNAME="missing0", GLOO_DEVICE_TRANSPORT="missing"):
            self.assertRegex(
                summarize(raised.exception),
                r"\. Unset GLOO_SOCKET_IFNAME=missing0: this machine has .*lo",
            )
            # torch reads it once in a process.
            unknown = summarize(RuntimeError("makeDeviceForInterface(): unsupported gloo device"))
        self.assertTrue(unknown.endswith(" device. Unset GLOO_DEVICE_TRANSPORT=missing"), unknown)
        # Our own choice.
        no_loopback = summarize(RuntimeError("ifa != nullptr. Unable to find address for: lo"))
        self.assertTrue(no_loopback.endswith("for: lo. Enable the loopback interface (ip link set lo up)"), no_loopback)

    def test_another_machine_that_gloo_does_not_reach(self):
        text = "Gloo connectFullMesh failed with [tcp/pair.cc:1] SO_ERROR: Connection refused, remote=[127.0.0.1]:1"
        for address, is_told in {"node0": True, "127.0.0.1": False}.items():
            with mock.patch.dict(os.environ, MASTER_ADDR=address):
                self.assertEqual("set GLOO_SOCKET_IFNAME to" in summarize(RuntimeError(text)), is_told)

    def test_times_are_exact(self):
        account = RankAccount(RankEnding.PASSED, 123456.7890123, 1e9 / 3)
        self.assertEqual(self.round_trip(account), account)

    def test_a_later_account_replaces_the_first(self):
        account_file = self.open_account()
        account_file.write(RankAccount(RankEnding.ERROR, 0.0, 1.0, "x" * 5000, "y" * 50_000))
        last = RankAccount(RankEnding.PASSED, 0.0, 2.0)
        account_file.write(last)
        self.assertEqual(read_account(self.file), last)

    def test_a_long_text_is_cut_in_the_middle(self):
        account = self.round_trip(
            RankAccount(RankEnding.ERROR, 0.0, 0.0, "a" * LONGEST_TEXT + "z", "b" * LONGEST_TEXT + "\n" + "c" * 10)
        )
        self.assertTrue(account.summary.startswith("aaa") and account.summary.endswith("aaz"))
        self.assertTrue(account.traceback.startswith("bbb") and account.traceback.endswith("\ncccccccccc"))
        for text in (account.summary, account.traceback):
            self.assertIn(" characters cut here ", text)
            self.assertLess(len(text), LONGEST_TEXT + 100)

    def test_none_was_written(self):
        self.assertIsNone(read_account(self.file))
        self.open_account()
        self.assertIsNone(read_account(self.file))

    def test_killed_while_writing(self):
        """At every step the file reads as no account, or as one of the two that were written."""
        before, after = RankAccount(RankEnding.ERROR, 0.0, 1.0, "x" * 700), RankAccount(RankEnding.PASSED, 0.0, 2.0)
        like_before = RankAccount(RankEnding.ERROR, 0.0, 1.0, "y" * 700)  # half of each would parse
        for first, second in ((None, before), (before, after), (after, before), (before, like_before)):
            for steps in range(8):
                self.file.unlink(missing_ok=True)
                account_file = self.open_account()
                if first is not None:
                    account_file.write(first)
                done = self._write_and_die_after(account_file, second, steps)
                with self.subTest(first=first, steps=steps, done=done):
                    self.assertIn(read_account(self.file), (second,) if done else (first, None, second))
                    if not done and steps > 0 and first is not None:
                        self.assertNotEqual(read_account(self.file), first, "half of another is written over it")
            self.assertTrue(done, "more steps than were tried")

    def _write_and_die_after(self, account_file, account, steps):
        class Killed(BaseException):
            pass

        def dying(call):
            def step(*args):
                nonlocal steps
                if steps == 0:
                    raise Killed
                steps -= 1
                return call(*args)

            return step

        with (
            mock.patch("os.pwrite", dying(_short_pwrite)),
            mock.patch("os.ftruncate", dying(os.ftruncate)),
        ):
            try:
                account_file.write(account)
            except Killed:
                return False
        return True

    def test_invalid_accounts(self):
        whole = messages.to_json(RankAccount(RankEnding.PASSED, 0.0, 1.0)).encode()
        for content in (b"", b"\0" * 100, whole[:-1], whole + b"\0\0", b"\0" + whole[1:], b"\xff"):
            with self.subTest(content=content):
                self.file.write_bytes(content)
                self.assertIsNone(read_account(self.file))

    def test_not_a_file(self):
        self.assertIsNone(read_account(self.directory))


_pwrite = os.pwrite


def _short_pwrite(fd, data, at):
    """The kernel may write fewer bytes than it was given."""
    return _pwrite(fd, bytes(data)[:400], at)


ON_A_SMALL_DISK = subject(__file__, "reports_on_a_small_disk.py")


class TestDisk(InDirectory):
    """A rank that filled the disk can still report it: space was reserved for its account."""

    TRACEBACK = "first line\n" + "t" * 300_000 + "\nlast line"
    LONG = RankAccount(RankEnding.ERROR, 0.0, 1.0, "summary " + "s" * 90_000, TRACEBACK, 10)

    def assertShort(self, account):
        self.assertIsNotNone(account, "no account")
        self.assertIs(account.ending, RankEnding.ERROR)
        self.assertEqual(account.code, 10)
        self.assertTrue(account.summary.startswith("summary s"), account.summary)
        self.assertTrue(account.traceback.startswith("first line\nt"))
        self.assertTrue(account.traceback.endswith("t\nlast line"))
        self.assertIn("characters cut here", account.traceback)

    def test_space_is_reserved(self):
        self.open_account()
        self.assertGreaterEqual(self.file.stat().st_blocks * 512, RESERVED)

    def test_the_shortest_form_fits_the_reserved_space(self):
        """This holds for any text: the widest character takes 12 bytes in an account."""
        wide = "\U0001f600" * 50_000
        with self._files_up_to(RESERVED):
            account = self.round_trip(RankAccount(RankEnding.ERROR, 0.0, 1.0, wide, wide, 10, ("torch.onnx",) * 1000))
        self.assertIsNotNone(account, "no account")
        self.assertTrue(account.summary.startswith("\U0001f600"))

    def test_file_size_limit(self):
        with self._files_up_to(RESERVED):
            self.assertShort(self.round_trip(self.LONG))

    def test_no_space_at_the_start(self):
        descriptors = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0
        with self._files_up_to(RESERVED // 2), self.assertRaises(OSError):
            AccountFile.open(self.file)
        if descriptors:
            self.assertEqual(len(os.listdir("/proc/self/fd")), descriptors)

    @unittest.skipUnless(HAS_MOUNT_NAMESPACES, "needs root on Linux and unshare, to mount a small file system")
    def test_full_disk(self):
        mount = 'mount -t tmpfs -o size=64k none "$1" && exec "$2" -c "$3" "$1"'
        # A separate mount namespace: no other process sees the file system, and it is removed with the process.
        done = subprocess.run(
            ["unshare", "-m", "sh", "-c", mount, "sh", str(self.directory), sys.executable, ON_A_SMALL_DISK],
            env={**os.environ, "PYTHONPATH": str(Path(torch_testing_ext.__file__).parents[1])},
            capture_output=True,
            text=True,
        )
        if "unshare failed" in done.stderr or "mount:" in done.stderr:
            self.skipTest(f"no small file system can be mounted here: {done.stderr}")
        self.assertEqual(done.stdout.splitlines(), ["28, 0 blocks left", "error", "last line"], done.stderr)

    @contextmanager
    def _files_up_to(self, size):
        """Limit the files of this process to this size; a write beyond it fails with EFBIG."""
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
            signal.signal(signal.SIGXFSZ, handler)


def status(code):
    """The wait status of an exit code, which is negative for a signal."""
    return -code if code < 0 else code << 8


class TestAssembleReport(unittest.TestCase):
    def assemble(self, written=None, code=0, stopped=False):
        """`written`: ending and exit code of the account."""
        account = None
        if written is not None:
            account = RankAccount(written[0], 10.0, 11.0, "summary", "traceback", written[1], ("torch.fx",))
        return assemble_report(2, account, Exit(status(code), 14.0, ("pid 7: cat",)), 9.0, 12.0 if stopped else None)

    def test_endings(self):
        passed, skipped, error = (RankEnding.PASSED, 0), (RankEnding.SKIPPED, 86), (RankEnding.ERROR, 10)
        failed = (RankEnding.FAILED, 10)
        term, kill, segv = -signal.SIGTERM, -signal.SIGKILL, -signal.SIGSEGV
        table = [
            # the account, the exit status, whether we ended the rank -> the ending
            (passed, 0, False, RankEnding.PASSED),
            (skipped, 86, False, RankEnding.SKIPPED),
            (failed, 10, False, RankEnding.FAILED),
            (error, 10, False, RankEnding.ERROR),
            (None, 0, False, RankEnding.EXITED),
            (None, 3, False, RankEnding.EXITED),
            (None, 10, False, RankEnding.EXITED),
            (None, segv, False, RankEnding.KILLED),
            (None, kill, False, RankEnding.KILLED),
            # It crashed while exiting.
            (passed, 1, False, RankEnding.EXITED),
            (passed, segv, False, RankEnding.KILLED),
            (skipped, 0, False, RankEnding.EXITED),
            (skipped, 87, False, RankEnding.EXITED),
            (error, 0, False, RankEnding.EXITED),
            (error, segv, False, RankEnding.KILLED),
            # Ended by us, without an account: however it reacts.
            (None, term, True, RankEnding.STOPPED),
            (None, kill, True, RankEnding.STOPPED),
            (None, 0, True, RankEnding.STOPPED),
            (None, 3, True, RankEnding.STOPPED),
            (None, segv, True, RankEnding.STOPPED),
            # Ended by us, but the test ended just before.
            (passed, 0, True, RankEnding.PASSED),
            (skipped, 86, True, RankEnding.SKIPPED),
            (error, 10, True, RankEnding.ERROR),
            # A recorded failure counts; but a rank that hangs while exiting has not passed.
            (error, term, True, RankEnding.ERROR),
            (failed, kill, True, RankEnding.FAILED),
            (passed, term, True, RankEnding.STOPPED),
            (passed, kill, True, RankEnding.STOPPED),
            (skipped, kill, True, RankEnding.STOPPED),
        ]
        for written, code, stopped, ending in table:
            with self.subTest(written=written, code=code, stopped=stopped):
                report = self.assemble(written, code, stopped)
                self.assertIs(report.ending, ending)
                self.assertEqual((report.rank, report.code, report.leftovers), (2, code, ("pid 7: cat",)))

    def test_an_account_written_after_sigterm(self):
        """A handler for our SIGTERM raises: the rank was still running, and the error is its reaction."""
        account = RankAccount(RankEnding.ERROR, 10.0, 13.0, "RuntimeError: told to exit", "traceback", 10)
        report = assemble_report(2, account, Exit(status(10), 14.0), 9.0, 12.0)
        self.assertIs(report.ending, RankEnding.STOPPED)
        self.assertIn("RuntimeError: told to exit", report.line())

    def test_the_account_is_kept(self):
        report = self.assemble((RankEnding.ERROR, 10), 10)
        self.assertEqual((report.summary, report.traceback), ("summary", "traceback"))
        self.assertEqual(report.final_account.imported, ("torch.fx",))

    def test_times_with_an_account(self):
        report = self.assemble((RankEnding.PASSED, 0), 0)
        self.assertEqual((report.seconds, report.ended), (1.0, 11.0))

    def test_times_without_an_account(self):
        """The launch counts as the start."""
        report = self.assemble(None, 3)
        self.assertEqual((report.seconds, report.ended), (5.0, 14.0))

    def test_times_after_a_crash_while_exiting(self):
        report = self.assemble((RankEnding.PASSED, 0), -signal.SIGSEGV)
        self.assertEqual((report.seconds, report.ended), (4.0, 14.0))
        self.assertEqual(report.summary, "the test had passed: summary")
        self.assertEqual(report.traceback, "traceback")
        self.assertEqual((report.final_account, report.error), (None, RaisedError()))


KILLED_BY_FAULT = HappenedFault(0, kill(rank=0, at=call(3)), "at all_reduce #3", 0.4)


class TestLine(unittest.TestCase):
    def test_lines(self):
        table = [
            (RankReport(0, RankEnding.PASSED, 1.234), "passed after 1.23 s"),
            (report_on(0, RankEnding.SKIPPED, 0.5, summary="no GPU"), "skipped after 0.50 s: no GPU"),
            (report_on(0, RankEnding.FAILED, 0.5, summary="1 != 2"), "failed after 0.50 s: 1 != 2"),
            (report_on(0, RankEnding.ERROR, 0.5, summary="KeyError: 1"), "error after 0.50 s: KeyError: 1"),
            (
                report_on(0, RankEnding.EXITED, 0.5, code=3),
                "exited with code 3 after 0.50 s, before the test finished",
            ),
            (
                report_on(0, RankEnding.EXITED, 0.5, code=3, account=PASSED),
                "exited with code 3 after 0.50 s, before the test finished; before that: the test had passed",
            ),
            (report_on(0, RankEnding.KILLED, 0.5, code=-11), "killed by SIGSEGV after 0.50 s"),
            (report_on(0, RankEnding.KILLED, 0.5, code=-9), "killed by SIGKILL after 0.50 s (out of memory?)"),
            (
                report_on(0, RankEnding.KILLED, 0.5, code=-6, account=PASSED),
                "killed by SIGABRT after 0.50 s; before that: the test had passed",
            ),
            (report_on(0, RankEnding.STOPPED, 0.5, code=-15), "still running after 0.50 s, terminated"),
            (
                report_on(0, RankEnding.STOPPED, 0.5, code=3),
                "still running after 0.50 s, terminated (it exited with code 3)",
            ),
            (
                report_on(0, RankEnding.STOPPED, 0.5, code=-9, account=PASSED),
                "still running after 0.50 s, terminated; before that: the test had passed",
            ),
            (report_on(0, RankEnding.LOST, 0.5, lost="server gone"), "lost after 0.50 s: server gone"),
            (
                report_on(0, RankEnding.FAULT, 0.5, code=-9, faults=FaultsSeen((KILLED_BY_FAULT,))),
                "was killed at all_reduce #3 by the fault after 0.50 s",
            ),
            (RankReport(0, RankEnding.UNSTARTED), "not started"),
        ]
        for report, line in table:
            with self.subTest(ending=report.ending, code=report.code):
                self.assertEqual(report.line(), line)
        self.assertEqual({report.ending for report, _ in table}, set(RankEnding))

    def test_signals_without_a_name(self):
        self.assertEqual(signal_name(signal.SIGTERM), "SIGTERM")
        self.assertEqual(signal_name(99), "signal 99")

    def test_which_endings_are_failures(self):
        self.assertEqual(
            {ending for ending in RankEnding if not ending.is_failure},
            {RankEnding.PASSED, RankEnding.SKIPPED, RankEnding.FAULT, RankEnding.UNSTARTED},
        )


class TestCutMiddle(unittest.TestCase):
    def test_short_enough(self):
        for text in ("", "abc", "a" * 10):
            self.assertEqual(cut_middle(text, 10), text)

    def test_in_one_line(self):
        self.assertEqual(cut_middle("abcdefghijk", 4), "ab ... 7 characters cut here ... jk")

    def test_in_lines(self):
        self.assertEqual(cut_middle("abc\ndefghij", 4), "ab\n... 7 characters cut here ...\nij")

    def test_odd_length(self):
        self.assertEqual(cut_middle("abcdefghijk", 5), "ab ... 7 characters cut here ... jk")


class TestTail(InDirectory):
    def log(self, content):
        self.file.write_bytes(content)
        return self.file

    def test_short(self):
        for content in ("", "one", "one\ntwo\n", "one\n\ntwo"):
            with self.subTest(content=content):
                self.assertEqual(tail(self.log(content.encode())), content.rstrip("\n"))

    def test_the_last_lines(self):
        lines = [f"line {number}" for number in range(1000)]
        self.assertEqual(tail(self.log("\n".join(lines).encode())), "\n".join(lines[-20:]))
        self.assertEqual(tail(self.file, lines=2), "line 998\nline 999")

    def test_long_lines(self):
        text = tail(self.log(b"a" * 100_000 + b"b" * 10))
        self.assertEqual(len(text), 8000)
        self.assertTrue(text.endswith("abbbbbbbbbb"))

    def test_a_large_file_is_not_read_in_full(self):
        with self.file.open("wb") as file:
            file.truncate(1 << 40)  # takes no space on disk
            file.seek(0, os.SEEK_END)
            file.write(b"\nthe end\n")
        self.assertEqual(tail(self.file).splitlines()[-1], "the end")

    def test_invalid_utf_8(self):
        self.assertEqual(tail(self.log(b"\xff\xfe ok\n")), "\ufffd\ufffd ok")

    def test_cut_inside_a_character(self):
        self.assertIn("\u4e16", tail(self.log("\u4e16".encode() * 5000)))

    def test_no_file(self):
        self.assertEqual(tail(self.file), "")
        self.assertEqual(tail(self.directory), "")


class TestReportOfAccount(unittest.TestCase):
    def test_it_says_what_its_account_says(self):
        error = RaisedError(
            "KeyError", Cause.TIMED_OUT, (Site("/x.py", 3, "f"),), "'a'\nsecond line", ("related",), "example"
        )
        account = RankAccount(RankEnding.ERROR, 1.0, 2.0, "summary", "traceback", 7, error=error)
        report = report_of(3, account, 1.0)
        self.assertEqual((report.rank, report.ending, report.seconds, report.ended), (3, RankEnding.ERROR, 1.0, 2.0))
        self.assertEqual((report.code, report.summary, report.traceback), (7, "summary", "traceback"))
        self.assertEqual((report.error, report.final_account, report.leftovers), (error, account, ()))
        self.assertEqual(report.error.title, "'a'")


if __name__ == "__main__":
    run_tests()

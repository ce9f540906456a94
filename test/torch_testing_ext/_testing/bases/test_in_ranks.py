"""MultiProcessTestCase in a rank: the environment of a test method, and the effects of its actions."""

import os
import random
import signal
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path
from unittest import mock

import numpy
import pytest
import torch
import torch.distributed as dist
from kit.outcomes import outcome_of
from kit.ranks import Ranks, outcome_and_told, ranks_told

from torch_testing_ext import launch
from torch_testing_ext.common_distributed import MultiProcessTestCase
from torch_testing_ext.common_utils import TestCase, run_tests


class Around(Ranks):
    def setUp(self):
        super().setUp()
        self.set_up_here = True

    def tearDown(self):
        Path(os.environ["TELL"], "tear-down-" + str(os.getpid())).touch()
        super().tearDown()

    @classmethod
    def tearDownClass(cls):
        raise AssertionError("a rank called tearDownClass")

    def itself(self):
        self.tell([self.rank, self.is_master, self.world_size, self.id(), os.path.basename(self.file_name)])

    def set_up(self):
        self.tell([hasattr(self, "set_up_here"), len(self._cleanups), os.getpid()])

    def seeds(self):
        drawn = [torch.rand(3).tolist(), random.random(), numpy.random.rand()]
        self.tell([torch.initial_seed(), *drawn])

    def environment(self):
        names = ("TEST_MADE", "TEST_CHANGED", "TEST_GONE")
        self.tell([os.getcwd(), [os.environ.get(name) for name in names]])

    def interpreter(self):
        self.tell([sys.path, sys.argv])

    def process(self):
        own = os.getpid()
        self.tell([os.getsid(0) == own, os.getpgrp() == own, own])

    def streams(self):
        null = os.stat(os.devnull)
        here = os.fstat(0)
        self.tell(
            [
                (here.st_dev, here.st_rdev) == (null.st_dev, null.st_rdev),
                sys.stdin.read(),
                [stream.fileno() for stream in (sys.stdin, sys.stdout, sys.stderr)],
                os.fstat(1).st_ino == os.fstat(2).st_ino,
            ]
        )

    def signals(self):
        numbers = (signal.SIGTERM, signal.SIGCHLD, signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM)
        default = all(signal.getsignal(number) is signal.SIG_DFL for number in numbers)
        self.tell([default, list(signal.pthread_sigmask(signal.SIG_BLOCK, []))])

    def a_process_of_its_own(self):
        done = subprocess.run([sys.executable, "-c", "print('child')"], stdout=subprocess.PIPE, check=True)
        self.tell(done.stdout.decode())

    def talks(self):
        print("by print")
        os.write(1, b"by write\n")
        sys.stderr.write("by stderr without an end")
        self.fail()

    def talks_and_passes(self):
        os.write(1, b"noise\n")
        os.write(2, b"noise\n")


class TestAround(TestCase):
    def test_itself(self):
        identity = Quiet("itself").id()
        told = [[0, True, 2, identity, "store"], [1, False, 2, identity, "store"]]
        self.assertEqual(ranks_told(Quiet("itself")), told)

    def test_no_set_up_and_no_tear_down(self):
        with tempfile.TemporaryDirectory() as directory, mock.patch.dict(os.environ, TELL=directory):
            self.assertEqual(outcome_of(Around("set_up")).outcome, "passed")
            torn_down = [path.name for path in Path(directory).glob("tear-down-*")]
            told = [path.read_text() for path in Path(directory).glob("[01]")]
        self.assertEqual(torn_down, [f"tear-down-{os.getpid()}"])
        self.assertEqual([text.startswith("[false, 0,") for text in told], [True, True], told)

    def test_seeds(self):
        with torch.random.fork_rng():
            torch.manual_seed(1234)
            tensor = torch.rand(3).tolist()
        expected = [1234, tensor, random.Random(1234).random(), numpy.random.RandomState(1234).rand()]
        for _ in range(2):
            torch.rand(1), random.random(), numpy.random.rand()
            self.assertEqual(self.told("seeds"), [expected, expected])

    def told(self, method):
        seen, told = outcome_and_told(Quiet(method))
        self.assertEqual(seen.outcome, "passed", seen.message)
        return told

    def test_current_environment_and_directory(self):
        before = os.getcwd()
        self.addCleanup(os.chdir, before)
        with mock.patch.dict(os.environ, TEST_CHANGED="1", TEST_GONE="1"):
            self.assertEqual(self.told("environment")[1], [before, [None, "1", "1"]])
            with tempfile.TemporaryDirectory() as directory:
                os.environ["TEST_MADE"] = "na\u00efve"
                os.environ["TEST_CHANGED"] = "2"
                del os.environ["TEST_GONE"]
                os.chdir(directory)
                here = os.getcwd()
                self.assertEqual(self.told("environment")[1], [here, ["na\u00efve", "2", None]])
                os.chdir(before)

    def test_current_path_and_arguments(self):
        self.told("itself")
        with mock.patch.object(sys, "path", [*sys.path, "/added/later"]), mock.patch.object(sys, "argv", ["x", "-v"]):
            for path, argv in self.told("interpreter"):
                self.assertEqual((path, argv), (sys.path, ["x", "-v"]))

    def test_session_and_process_group_of_its_own(self):
        told = self.told("process")
        self.assertEqual([own[:2] for own in told], [[True, True], [True, True]])
        self.assertEqual(len({os.getpid(), *(pid for _, _, pid in told)}), 3)

    def test_standard_streams(self):
        """Even if the parent has unread input, which its forks inherit."""
        reading, writing = os.pipe()
        before = os.dup(0)
        os.write(writing, b"not for ranks")
        os.dup2(reading, 0)
        try:
            launch.close()
            self.assertEqual(self.told("streams"), [[True, "", [0, 1, 2], True]] * 2)
        finally:
            os.dup2(before, 0)
            launch.close()
            for fd in (reading, writing, before):
                os.close(fd)

    def test_signal_handlers(self):
        self.assertEqual(self.told("signals"), [[True, []]] * 2)

    def test_a_process_of_its_own(self):
        self.assertEqual(self.told("a_process_of_its_own"), ["child\n", "child\n"])

    def test_output_is_in_the_message(self):
        message = outcome_of(Quiet("talks")).message
        said = "by print\nby write\nby stderr without an end"
        self.assertRegex(message, rf"\n\nranks 0, 1 printed the same; rank \d's last lines of output:\n{said}\n")

    def test_output_of_a_pass_is_not_shown(self):
        with tempfile.TemporaryFile() as file, _both_streams_to(file.fileno()):
            self.assertEqual(outcome_of(Quiet("talks_and_passes")).outcome, "passed")
            file.seek(0)
            self.assertEqual(file.read(), b"")

    @pytest.mark.slow
    def test_output_is_shown_on_request(self):
        with tempfile.TemporaryFile() as file, mock.patch.dict(os.environ, TORCH_TESTING_EXT_STREAM="1"):
            # The fork server keeps the stderr that this process had when it forked: hence a new process.
            done = subprocess.run(
                [sys.executable, __file__, "Quiet.talks_and_passes"], stdout=file, stderr=subprocess.PIPE, text=True
            )
        self.assertEqual(done.returncode, 0, done.stderr)
        for rank in range(2):
            self.assertEqual(done.stderr.count(f"[rank{rank}] noise\n"), 2)


class _both_streams_to:
    def __init__(self, fd):
        self.fd = fd

    def __enter__(self):
        sys.stdout.flush()
        sys.stderr.flush()
        self.before = [os.dup(fd) for fd in (1, 2)]
        for fd in (1, 2):
            os.dup2(self.fd, fd)

    def __exit__(self, *_):
        for fd, before in enumerate(self.before, 1):
            os.dup2(before, fd)
            os.close(before)


class Quiet(Around):
    """Without the output of tear-down."""

    tearDown = Ranks.tearDown
    tearDownClass = Ranks.tearDownClass


class OwnRun(Ranks):
    """Overrides `_run`, as suites do."""

    def tells(self):
        self.tell([self.rank, self.extra])

    def fails(self):
        self.fail("no")


class WithKwargs(OwnRun):
    @classmethod
    def _run(cls, rank, test_name, file_name, pipe, **kwargs):
        self = cls(test_name)
        self.rank = rank
        self.file_name = file_name
        self.extra = kwargs
        self.run_test(test_name, pipe)
        Path(os.environ["AFTER"], f"{rank}").touch()


class DrawsBefore(OwnRun):
    @classmethod
    def _run(cls, rank, test_name, file_name, pipe, **kwargs):
        torch.rand(rank + 1), random.random()
        super()._run(rank, test_name, file_name, pipe, **kwargs)

    def draws(self):
        self.tell([torch.rand(3).tolist(), random.random()])


class WithoutKwargs(OwnRun):
    @classmethod
    def _run(cls, rank, test_name, file_name, pipe):
        self = cls(test_name)
        self.rank = rank
        self.file_name = file_name
        self.extra = "none"
        self.run_test(test_name, pipe)


class WithOneOption(OwnRun):
    fake_pg = True

    @classmethod
    def _run(cls, rank, test_name, file_name, pipe, fake_pg=False):
        self = cls(test_name)
        self.rank = rank
        self.file_name = file_name
        self.extra = fake_pg
        self.run_test(test_name, pipe)


class RaisesInSetUp(OwnRun):
    @classmethod
    def _run(cls, rank, test_name, file_name, pipe, **kwargs):
        if rank == 1:
            raise ConnectionError("no group for you")
        super()._run(rank, test_name, file_name, pipe, **kwargs)

    def passes(self):
        pass


class SkipsInSetUp(OwnRun):
    @classmethod
    def _run(cls, rank, test_name, file_name, pipe, **kwargs):
        raise unittest.SkipTest("no such thing here")


class AnotherName(Ranks):
    def _current_test_name(self):
        return "tells_really"

    def tells(self):
        self.fail("the ranks run what _current_test_name says")

    def tells_really(self):
        self.tell(self.rank)


class TestOwnRun(TestCase):
    def run_told(self, test):
        with tempfile.TemporaryDirectory() as after, mock.patch.dict(os.environ, AFTER=after):
            seen, told = outcome_and_told(test)
            return seen, told, sorted(os.listdir(after))

    def test_with_kwargs(self):
        seen, told, after = self.run_told(WithKwargs("tells"))
        self.assertEqual(seen.outcome, "passed", seen.message)
        self.assertEqual(told, [[0, {"fake_pg": False}], [1, {"fake_pg": False}]])
        self.assertEqual(after, ["0", "1"])

    def test_an_overriding_run_ends_with_a_failing_test(self):
        seen, _, after = self.run_told(WithKwargs("fails"))
        self.assertEqual((seen.outcome, after), ("failed", []), seen.message)

    def test_seeds_are_set_after_it(self):
        with torch.random.fork_rng():
            torch.manual_seed(1234)
            expected = [torch.rand(3).tolist(), random.Random(1234).random()]
        self.assertEqual(ranks_told(DrawsBefore("draws")), [expected, expected])

    def test_without_kwargs(self):
        self.assertEqual(ranks_told(WithoutKwargs("tells")), [[0, "none"], [1, "none"]])

    def test_with_an_option_by_name(self):
        self.assertEqual(ranks_told(WithOneOption("tells")), [[0, True], [1, True]])

    def test_set_up_of_one_rank_raises(self):
        seen = outcome_of(RaisesInSetUp("passes"))
        self.assertEqual(seen.outcome, "error")
        self.assertIn("rank 1 of 2 raised", seen.message)
        self.assertIn('raise ConnectionError("no group for you")', seen.message)

    def test_set_up_skips(self):
        self.assertEqual(outcome_of(SkipsInSetUp("tells")), ("skipped", "no such thing here"))

    def test_current_test_name(self):
        self.assertEqual(ranks_told(AnotherName("tells")), [0, 1])


class Leaving(Ranks):
    """The process group at the end of a rank."""

    backend = "gloo"

    @classmethod
    def _run(cls, rank, test_name, file_name, pipe, **kwargs):
        calls = []
        real = dist.destroy_process_group
        dist.destroy_process_group = lambda *args: (calls.append(args), real(*args))
        self = cls(test_name)
        self.rank, self.file_name = rank, file_name
        self.run_test(test_name, pipe)
        self.tell([len(calls), dist.is_initialized()])

    def with_a_group(self):
        if self.backend == "fake":
            import torch_testing_ext.distributed.fake_pg  # noqa: F401
        store = dist.FileStore(self.file_name, self.world_size)
        dist.init_process_group(self.backend, store=store, rank=self.rank, world_size=self.world_size)
        dist.barrier()

    def without_a_group(self):
        pass

    def with_a_destroyed_group(self):
        self.with_a_group()
        dist.destroy_process_group()


class InFull(Leaving):
    fast_exit = False


class Kept(InFull):
    destroy_pg_upon_exit = False


class OtherBackend(Leaving):
    backend = "fake"


class TestLeaving(TestCase):
    @pytest.mark.slow
    def test_group_at_the_end(self):
        table = [
            # calls of destroy_process_group, and is there a group after the test
            (Leaving, "with_a_group", [1, False]),
            (InFull, "with_a_group", [1, False]),
            (Kept, "with_a_group", [0, True]),
            (OtherBackend, "with_a_group", [1, False]),
            (InFull, "without_a_group", [0, False]),
            (InFull, "with_a_destroyed_group", [1, False]),
        ]
        for kind, method, expected in table:
            with self.subTest(kind=kind.__name__, method=method):
                self.assertEqual(ranks_told(kind(method)), [expected, expected])

    def test_by_default_groups_are_destroyed(self):
        self.assertIs(MultiProcessTestCase("run").destroy_pg_upon_exit, True)


if __name__ == "__main__":
    run_tests()

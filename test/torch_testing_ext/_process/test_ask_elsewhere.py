"""Questions to another process: the answers, and each way to give none."""

import os
import signal
import sys
import time
import unittest
from unittest import mock

from torch_testing_ext._process import ends, system
from torch_testing_ext._process.event_loop import wait_readable
from torch_testing_ext._process.questions import By, NoAnswer, OtherProcess, Silence, ask_elsewhere
from torch_testing_ext.common_utils import run_tests


def _number_of_questions(numbers=[]):  # noqa: B006
    """Count the questions of a process, which keeps what it knows."""
    numbers.append(None)
    return len(numbers)


class QuestionsTest(unittest.TestCase):
    def setUp(self):
        self.before = self.resources()

    def tearDown(self):
        """Nothing is left, whatever the answer was."""
        self.assertEqual(self.resources(), self.before)

    @staticmethod
    def resources():
        return len(os.listdir("/proc/self/fd")), system.children(os.getpid())

    def each_way(self):
        for by in By:
            with self.subTest(by=by):
                yield by

    def silence_of(self, by, question, *arguments, timeout=60.0):
        """The text and the kind of the failure of a question."""
        with self.assertRaises(NoAnswer) as caught:
            ask_elsewhere(question, *arguments, by=by, who="the oracle", timeout=timeout)
        return str(caught.exception), caught.exception.silence

    def test_another_process_answers(self):
        for by in self.each_way():
            pid, parent = (ask_elsewhere(ask, by=by, who="the system", timeout=60.0) for ask in (os.getpid, os.getppid))
            self.assertNotEqual(pid, os.getpid())
            self.assertEqual(parent, os.getpid())

    def test_a_conversation(self):
        for by in self.each_way():
            process = OtherProcess(by, "the system", 60.0)
            self.assertEqual(len({process.ask(os.getpid) for _ in range(3)}), 1)
            self.assertEqual(process.ask(divmod, 7, 2), (3, 1))
            process.close()
            with self.assertRaisesRegex(NoAnswer, "the system is no longer asked"):
                process.ask(os.getpid)

    def test_a_forked_child_keeps_what_it_knows(self):
        process = OtherProcess(By.FORK, "the system", 60.0)
        self.assertEqual([process.ask(_number_of_questions) for _ in range(3)], [1, 2, 3])
        process.close()
        self.assertEqual(_number_of_questions.__defaults__, ([],))

    def test_an_error_of_the_question(self):
        for by in self.each_way():
            refused = self.silence_of(by, int, "a\nb")
            self.assertEqual(refused, ("invalid literal for int() with base 10: 'a\\nb'", Silence.REFUSED))
            self.assertEqual(self.silence_of(by, next, iter(())), ("StopIteration", Silence.REFUSED))

    def test_a_process_that_is_stuck(self):
        for by in self.each_way():
            stuck = self.silence_of(by, signal.pause, timeout=0.2)
            self.assertEqual(stuck, ("the oracle has not answered within 0.2 s", Silence.LATE))

    def test_a_process_that_dies(self):
        for by in self.each_way():
            process = OtherProcess(by, "the oracle", 60.0)
            pid = process.ask(os.getpid)
            # The second time, it is known.
            for _ in range(2):
                with self.assertRaisesRegex(NoAnswer, "that asks the oracle was killed by SIGKILL") as died:
                    process.ask(os.kill, pid, signal.SIGKILL)
                self.assertIs(died.exception.silence, Silence.ENDED)

    def test_an_interpreter_that_does_not_start(self):
        with mock.patch.object(sys, "executable", "/bin/false"):
            text, silence = self.silence_of(By.INTERPRETER, os.getpid)
        self.assertEqual((text, silence), ("the process that asks the oracle exited with code 1", Silence.ENDED))

    def test_it_ends_with_the_process_that_asks(self):
        """Also while it is stuck."""
        for by in self.each_way():
            reader, writer = os.pipe()
            asking = os.fork()
            if asking == 0:
                process = OtherProcess(by, "the system", 60.0)
                os.write(writer, str(process.ask(os.getpid)).encode())
                process.ask(signal.pause)
            os.close(writer)
            answering = int(os.read(reader, 100))
            os.close(reader)
            gone = os.pidfd_open(answering)
            os.kill(asking, signal.SIGKILL)
            os.waitpid(asking, 0)
            self.assertTrue(wait_readable(gone, time.monotonic() + 60.0))
            os.close(gone)
            # An earlier test may have made this process the one that adopts orphans.
            ends.wait_until_gone([answering])


if __name__ == "__main__":
    run_tests()

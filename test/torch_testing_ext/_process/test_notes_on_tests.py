"""The notes on a test that the process that runs it takes for the runner."""

import contextlib
import io
import unittest

from torch_testing_ext._process import user_shell
from torch_testing_ext._process.user_shell import KitWarning, Notes

NOTHING = Notes((), (), (), ())


class TestOfOneTest(unittest.TestCase):
    def setUp(self) -> None:
        user_shell.take_notes()

    def test_notes_are_taken_once(self) -> None:
        with contextlib.redirect_stderr(io.StringIO()) as stderr:
            user_shell.warn_user("ranks are slow", "of Thread-1")
        user_shell.note_left_running(["rank 0: pid 1: sleep"])
        user_shell.note_memory([((0, 5, 10),), (), ((1, 6, 20),)])
        self.assertEqual(stderr.getvalue(), "torch_testing_ext: ranks are slow, because of Thread-1\n")
        notes = user_shell.take_notes()
        self.assertEqual(notes.warnings, (KitWarning("ranks are slow", "of Thread-1"),))
        self.assertEqual(notes.left_running, ("rank 0: pid 1: sleep",))
        self.assertEqual(notes.memory, (((0, 5, 10),), ((1, 6, 20),)))
        self.assertEqual(user_shell.take_notes(), NOTHING)

    def test_a_warning_is_noted_if_stderr_is_closed(self) -> None:
        closed = io.StringIO()
        closed.close()
        with contextlib.redirect_stderr(closed):
            user_shell.warn_user("lost")
        self.assertEqual([str(warning) for warning in user_shell.take_notes().warnings], ["lost"])

    def test_a_fixture_takes_the_processes_alone(self) -> None:
        user_shell.note_left_running(["a"])
        user_shell.note_memory([((0, 5, 10),)])
        self.assertEqual(user_shell.take_left_running(), ("a",))
        self.assertEqual(user_shell.take_notes(), Notes((), (), (((0, 5, 10),),), ()))

    def test_the_next_test_does_not_have_the_memory(self) -> None:
        user_shell.note_left_running(["of a fixture"])
        user_shell.note_memory([((0, 5, 10),)])
        user_shell.forget_memory()
        self.assertEqual(user_shell.take_notes(), Notes((), ("of a fixture",), (), ()))


if __name__ == "__main__":
    unittest.main()

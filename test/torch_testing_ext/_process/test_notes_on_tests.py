"""The notes on a test that the process that runs it takes for the runner."""

import contextlib
import io
import unittest

from torch_testing_ext._process import test_notes
from torch_testing_ext._process.test_notes import KitWarning, Notes

NOTHING = Notes((), (), ())


class TestOfOneTest(unittest.TestCase):
    def setUp(self) -> None:
        test_notes.take()

    def test_notes_are_taken_once(self) -> None:
        with contextlib.redirect_stderr(io.StringIO()) as stderr:
            test_notes.warn_user("ranks are slow", "of Thread-1")
        test_notes.note_left_running(["rank 0: pid 1: sleep"])
        test_notes.note_memory([((0, 5, 10),), (), ((1, 6, 20),)])
        self.assertEqual(stderr.getvalue(), "torch_testing_ext: ranks are slow, because of Thread-1\n")
        notes = test_notes.take()
        self.assertEqual(notes.warnings, (KitWarning("ranks are slow", "of Thread-1"),))
        self.assertEqual(notes.left_running, ("rank 0: pid 1: sleep",))
        self.assertEqual(notes.memory, (((0, 5, 10),), ((1, 6, 20),)))
        self.assertEqual(test_notes.take(), NOTHING)

    def test_a_warning_is_noted_if_stderr_is_closed(self) -> None:
        closed = io.StringIO()
        closed.close()
        with contextlib.redirect_stderr(closed):
            test_notes.warn_user("lost")
        self.assertEqual([str(warning) for warning in test_notes.take().warnings], ["lost"])

    def test_a_fixture_takes_the_processes_alone(self) -> None:
        test_notes.note_left_running(["a"])
        test_notes.note_memory([((0, 5, 10),)])
        self.assertEqual(test_notes.take_left_running(), ("a",))
        self.assertEqual(test_notes.take(), Notes((), (), (((0, 5, 10),),)))

    def test_the_next_test_does_not_have_the_memory(self) -> None:
        test_notes.note_left_running(["of a fixture"])
        test_notes.note_memory([((0, 5, 10),)])
        test_notes.forget_memory()
        self.assertEqual(test_notes.take(), Notes((), ("of a fixture",), ()))


if __name__ == "__main__":
    unittest.main()

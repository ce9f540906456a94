"""The notes on a test that the process that runs it takes for the runner."""

import contextlib
import io
import unittest

from torch_testing_ext._tests.notes import (
    KitWarning,
    Notes,
    forget_memory,
    note_left_running,
    note_memory,
    take_left_running,
    take_notes,
    warn_user,
)

NOTHING = Notes((), (), (), ())


class TestOfOneTest(unittest.TestCase):
    def setUp(self) -> None:
        take_notes()

    def test_notes_are_taken_once(self) -> None:
        with contextlib.redirect_stderr(io.StringIO()) as stderr:
            warn_user("ranks are slow", "of Thread-1")
        note_left_running(["rank 0: pid 1: sleep"])
        note_memory({0: ((0, 5, 10),), 1: (), 2: ((1, 6, 20),)})
        self.assertEqual(stderr.getvalue(), "torch_testing_ext: ranks are slow, because of Thread-1\n")
        notes = take_notes()
        self.assertEqual(notes.warnings, (KitWarning("ranks are slow", "of Thread-1"),))
        self.assertEqual(notes.left_running, ("rank 0: pid 1: sleep",))
        self.assertEqual(notes.memory, (((0, 5, 10),), ((1, 6, 20),)))
        self.assertEqual(take_notes(), NOTHING)

    def test_a_warning_is_noted_if_stderr_is_closed(self) -> None:
        closed = io.StringIO()
        closed.close()
        with contextlib.redirect_stderr(closed):
            warn_user("lost")
        self.assertEqual([str(warning) for warning in take_notes().warnings], ["lost"])

    def test_a_fixture_takes_the_processes_alone(self) -> None:
        note_left_running(["a"])
        note_memory({0: ((0, 5, 10),)})
        self.assertEqual(take_left_running(), ("a",))
        self.assertEqual(take_notes(), Notes((), (), (((0, 5, 10),),), ()))

    def test_a_rank_that_says_it_twice_counts_once(self) -> None:
        note_memory({0: ((0, 5, 10), (1, 1, 1))})
        note_memory({0: ((0, 4, 11),)})
        self.assertEqual(take_notes().memory, (((0, 5, 11), (1, 1, 1)),))

    def test_the_next_test_does_not_have_the_memory(self) -> None:
        note_left_running(["of a fixture"])
        note_memory({0: ((0, 5, 10),)})
        forget_memory()
        self.assertEqual(take_notes(), Notes((), ("of a fixture",), (), ()))


if __name__ == "__main__":
    unittest.main()

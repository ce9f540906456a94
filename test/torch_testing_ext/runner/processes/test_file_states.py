"""Tests the states of the process of a test file: as a table, without processes."""

from torch_testing_ext.common_utils import TestCase, run_tests
from torch_testing_ext.runner.processes.file_handle import FileState, after

S = FileState
FINAL = (S.UNSAFE, S.SKIPPED, S.BROKEN)


class TestFileStates(TestCase):
    def test_histories(self):
        for changes, state in (
            ([], S.CLOSED),
            ([S.OPENING], S.OPENING),
            ([S.OPENING, S.READY], S.READY),
            ([S.OPENING, S.READY, S.CLOSED], S.CLOSED),
            ([S.OPENING, S.READY, S.CLOSED, S.OPENING, S.READY], S.READY),
            ([S.OPENING, S.UNSAFE, S.READY, S.CLOSED], S.UNSAFE),
            ([S.OPENING, S.READY, S.UNSAFE], S.UNSAFE),  # by a module that a test imported
            ([S.OPENING, S.SKIPPED, S.CLOSED], S.SKIPPED),
            ([S.OPENING, S.BROKEN, S.CLOSED], S.BROKEN),
            ([S.OPENING, S.BROKEN, S.READY], S.BROKEN),  # it was given up before
            ([S.BROKEN], S.BROKEN),  # the system refused its process
            (
                [S.OPENING, S.CLOSED, S.OPENING, S.READY],
                S.READY,
            ),  # it was lost with the preloaded server, or is for pytest
            ([S.OPENING, S.CLOSED, S.OPENING, S.BROKEN, S.CLOSED], S.BROKEN),  # not in time: it is not tried again
        ):
            with self.subTest(changes=changes):
                now = S.CLOSED
                for wanted in changes:
                    now = after(now, wanted)
                self.assertEqual(now, state)

    def test_final_states(self):
        for state in FINAL:
            self.assertEqual({after(state, wanted) for wanted in S}, {state})


if __name__ == "__main__":
    run_tests()

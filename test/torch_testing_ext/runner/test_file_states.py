"""Tests the states of the process of a test file: as a table, without processes."""

from torch_testing_ext.common_utils import TestCase, run_tests
from torch_testing_ext.runner.processes.file_handle import FileEvent, FileState, after

S, E = FileState, FileEvent
FINAL = (S.UNSAFE, S.SKIPPED, S.BROKEN)


class TestFileStates(TestCase):
    def test_histories(self):
        for events, state in (
            ([], S.CLOSED),
            ([E.OPENED], S.OPENING),
            ([E.OPENED, E.IMPORTED], S.READY),
            ([E.OPENED, E.IMPORTED, E.ENDED], S.CLOSED),
            ([E.OPENED, E.IMPORTED, E.ENDED, E.OPENED, E.IMPORTED], S.READY),
            ([E.OPENED, E.UNSAFE, E.IMPORTED, E.ENDED], S.UNSAFE),
            ([E.OPENED, E.IMPORTED, E.UNSAFE], S.UNSAFE),  # by a module that a test imported
            ([E.OPENED, E.SKIPPED, E.ENDED], S.SKIPPED),
            ([E.OPENED, E.FAILED, E.ENDED], S.BROKEN),
            ([E.OPENED, E.FAILED, E.IMPORTED], S.BROKEN),  # it was given up before
            ([E.FAILED], S.BROKEN),  # the system refused its process
            ([E.OPENED, E.LOST], S.SUSPECT),
            ([E.OPENED, E.LOST, E.ENDED], S.SUSPECT),
            ([E.OPENED, E.LOST, E.OPENED, E.IMPORTED], S.READY),
            ([E.OPENED, E.NEEDS_PYTEST], S.RELOADING),
            ([E.OPENED, E.NEEDS_PYTEST, E.ENDED], S.CLOSED),
            ([E.OPENED, E.NEEDS_PYTEST, E.FAILED, E.ENDED], S.BROKEN),  # not imported in time: it is not tried again
        ):
            with self.subTest(events=events):
                now = S.CLOSED
                for event in events:
                    now = after(now, event)
                self.assertEqual(now, state)

    def test_final_states(self):
        for state in FINAL:
            self.assertEqual({after(state, event) for event in E}, {state})

    def test_only_an_import_can_be_lost_to_the_zygote(self):
        self.assertEqual([state for state in S if after(state, E.LOST) is S.SUSPECT], [S.OPENING, S.SUSPECT])


if __name__ == "__main__":
    run_tests()

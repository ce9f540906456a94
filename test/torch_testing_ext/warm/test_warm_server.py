"""What a warm server learns from the programs that it has run. No process is started."""

from __future__ import annotations

import socket
import tempfile
import unittest

from torch_testing_ext.warm import server_link
from torch_testing_ext.warm.server_link import StartedAgain
from torch_testing_ext.warm.warm_server import WarmServer


class NotesTest(unittest.TestCase):
    """Notes of programs that had to start again, since their modules were not those of the server."""

    def setUp(self) -> None:
        # Its constructor prepares this process for imports that it may take back, for good.
        self.server = WarmServer.__new__(WarmServer)
        self.server._notes, self.programs = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        for end in (self.server._notes, self.programs):
            end.setblocking(False)
            self.addCleanup(end.close)
        self.server._set_by, self.server._cold = {}, {}

    def note(self, program: str, environ: dict[str, str | None], *folders: str) -> None:
        self.programs.send(server_link.encode(StartedAgain(program, "why", environ, list(folders))))

    def test_the_next_run_has_the_variables_of_all_notes(self) -> None:
        self.note("a", {"X": "1"})
        self.note("b", {"X": "2"})
        self.note("a", {"Y": None})
        self.server._take_notes()
        self.assertEqual(self.server._set_by, {"a": {"X": "1", "Y": None}, "b": {"X": "2"}})
        self.assertEqual(self.server._cold, {})

    def test_cold_where_the_variables_do_not_help(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            for _ in range(2):
                self.note("a", {"X": "1"}, folder)
            self.server._take_notes()
            self.assertEqual(list(self.server._cold), ["a"])
            self.assertEqual(list(self.server._cold["a"].folders), [folder])

    def test_no_notes(self) -> None:
        self.server._take_notes()
        self.assertEqual(self.server._set_by, {})


if __name__ == "__main__":
    unittest.main()

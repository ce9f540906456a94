"""The line that says what is imported, where rich is not installed."""

import unittest

from torch_testing_ext.runner.events import Importing, RunBegan, Warned
from torch_testing_ext.runner.report.status_line import StatusLine


class Screen:
    """A terminal of one line, and the lines that have scrolled by."""

    def __init__(self):
        self.lines, self.line = [], ""

    def write(self, text):
        if text.startswith("\r\x1b[K"):
            self.line, text = "", text.removeprefix("\r\x1b[K")
        *whole, self.line = (self.line + text).split("\n")
        self.lines += whole


class StatusLineTest(unittest.TestCase):
    def test_until_the_run_begins(self):
        screen = Screen()
        status = StatusLine(screen, lambda: 40)
        for event, line in (
            (Importing((), 2, 2), "importing torch, then 2 files"),
            (Importing(("tests/test_a.py", "tests/test_b.py"), 2, 2), "importing 1/2: test_a.py, test_b.py"),
            (Importing(("tests/test_b.py",), 1, 2), "importing 2/2: test_b.py"),
            (Importing(("tests/test_" + "b" * 60 + ".py",), 1, 2), "importing 2/2: test_" + "b" * 16 + "..."),
            (RunBegan((), (), (), 2, 0.0), ""),
            (Warned("something"), ""),
        ):
            with self.subTest(event=event):
                status.on_event(event)
                self.assertEqual(screen.line, line)
                status.write("a report\n")
                self.assertEqual((screen.line, screen.lines.pop()), (line, "a report"))


if __name__ == "__main__":
    unittest.main()

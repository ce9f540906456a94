"""The files that are being imported, in words, and the line that says so where rich is not installed."""

import unittest

from torch_testing_ext.runner.events import Importing, RunBegan, Warned
from torch_testing_ext.runner.report.import_note import ImportNote, importing


class Screen:
    def __init__(self):
        self.text = ""

    def write(self, text):
        self.text += text


class StatusLineTest(unittest.TestCase):
    def test_words(self):
        for event, words in (
            (Importing((), 2, 2), "importing torch, then 2 files"),
            (Importing(("tests/test_a.py", "tests/test_b.py"), 2, 2), "importing 1/2: test_a.py, test_b.py"),
            (Importing(("tests/test_b.py",), 1, 2), "importing 2/2: test_b.py"),
        ):
            with self.subTest(event=event):
                self.assertEqual(importing(event), words)

    def test_it_is_printed_once(self):
        screen = Screen()
        note = ImportNote(screen)
        for event in (
            Importing((), 2, 2),
            Importing(("tests/test_a.py", "tests/test_b.py"), 2, 2),
            Importing(("tests/test_b.py",), 1, 2),
            RunBegan((), (), (), 2, 0.0),
            Warned("something"),
        ):
            note.on_event(event)
            self.assertEqual(screen.text, "importing torch, then 2 files\n")
        note.write("a report\n")
        self.assertEqual(screen.text, "importing torch, then 2 files\na report\n")


if __name__ == "__main__":
    unittest.main()

"""docs/tools/pictures.py shows what a terminal would."""

import sys
import unittest
from pathlib import Path

import torch_testing_ext
from torch_testing_ext.common_utils import run_tests

ROOT = Path(torch_testing_ext.__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "docs" / "tools"))

from pictures import Screen  # noqa: E402


def screen_of(*texts: str) -> Screen:
    screen = Screen()
    for text in texts:
        screen.feed(text)
    return screen


class ScreenTest(unittest.TestCase):
    def test_text(self) -> None:
        self.assertEqual(str(screen_of("one\r\n", "two\r\n")), "one\ntwo\n")
        self.assertEqual(str(screen_of("12 %\r50\r\n")), "50 %\n")

    def test_a_display_is_drawn_again(self) -> None:
        """As rich does it: up, and each line anew."""
        first, again = "run 1\r\nleft 3", "\r\x1b[2K\x1b[1A\x1b[2Krun 2\r\nleft 2"
        self.assertEqual(str(screen_of(first, again)), "run 2\nleft 2")

    def test_a_page_is_drawn_again(self) -> None:
        """On the other screen, from its first line."""
        self.assertEqual(str(screen_of("\x1b[?1049h\x1b[Hold page\r\nmore", "\x1b[H\x1b[2Jnew")), "new")

    def test_a_sequence_in_two_parts(self) -> None:
        self.assertEqual(str(screen_of("\x1b[3", "1mred\x1b", "[0m plain")), "red plain")

    def test_styles(self) -> None:
        text = screen_of("\x1b[1;31mfailed\x1b[0m test_x\r\n\r\n").text()
        self.assertEqual(text.plain, "failed test_x\n")
        styles = {str(span.style) for span in text.spans}
        self.assertIn("bold red", styles)


if __name__ == "__main__":
    run_tests()

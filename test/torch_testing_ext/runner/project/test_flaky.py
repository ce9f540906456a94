"""A test that passes on the third attempt. PROJECT_ATTEMPTS names the file in which it counts."""

import os
import unittest
from pathlib import Path


class FlakyTest(unittest.TestCase):
    def test_passes_on_the_third_attempt(self):
        with Path(os.environ["PROJECT_ATTEMPTS"]).open("a+") as attempts:
            attempts.write("attempt\n")
            attempts.seek(0)
            number = len(attempts.readlines())
        self.assertGreaterEqual(number, 3, f"attempt {number} is too early")

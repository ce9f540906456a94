import subprocess
import sys
import tempfile
import unittest


class PlainTest(unittest.TestCase):
    def test_plain(self):
        with tempfile.NamedTemporaryFile("w") as file:
            open(file.name).close()
        open("written.txt", "w").close()
        open("written.txt").close()

    def test_program(self):
        subprocess.run([sys.executable, "-c", "pass"])

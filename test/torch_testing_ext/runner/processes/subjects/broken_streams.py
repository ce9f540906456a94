import sys
import unittest


class Broken:
    def __getattr__(self, name):
        raise LookupError(name)


class T(unittest.TestCase):
    def test_closed(self):
        sys.stdout.close()
        sys.stderr.close()

    def test_none(self):
        sys.stdout = sys.stderr = None

    def test_broken(self):
        sys.stdout = sys.stderr = Broken()

    def test_fails_too(self):
        sys.stdout = sys.stderr = None
        self.fail("for a reason of its own")

import os
import sys
import threading
import unittest

SEEN = []


class T(unittest.TestCase):
    def check(self):
        self.assertEqual(SEEN, [])
        self.assertNotIn("CHANGED", os.environ)
        self.assertTrue(os.path.samefile(os.getcwd(), os.path.dirname(__file__)))
        self.assertEqual(threading.active_count(), 1)
        self.assertEqual(sys.argv, [__file__])
        SEEN.append(1)
        os.environ["CHANGED"] = "1"
        os.chdir("/")
        sys.argv.append("x")
        threading.Thread(target=threading.Event().wait).start()  # and never joined

    test_one = test_two = test_three = check

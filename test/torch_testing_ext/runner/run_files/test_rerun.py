"""`--rerun FILE`: failed, not run and new tests, with what another machine has written."""

import unittest

from kit.runs import RunsCase

TESTS = """
import os
import unittest

class T(unittest.TestCase):
    def test_passes(self): pass
    def test_fails(self): assert os.environ.get("MENDED")
    @unittest.skipUnless(os.environ.get("MENDED"), "not here")
    def test_skips(self): pass
    def test_is_left_out(self): pass
"""
NEW = "    def test_is_new(self): pass\n"


class RerunTest(RunsCase):
    def ran(self, *words, code, **environ):
        self.out = self.finish(self.start(*words, "--results=results.json", environ=environ, stdout=-1), code)
        return self.outcomes()

    def test_what_did_not_pass_there(self):
        self.write("tests/test_a.py", TESTS)
        self.ran("-k", "not left_out", "--run-file=there.ttx", code=1)
        self.write("tests/test_a.py", TESTS + NEW)
        wanted = {"test_fails", "test_skips", "test_is_left_out", "test_is_new"}
        ran = self.ran("--rerun=there.ttx", "--run-file=here.ttx", code=0, MENDED="1")
        self.assertEqual(ran, dict.fromkeys(wanted, "passed"))
        self.assertEqual(set(self.ran("--rerun=here.ttx", code=0)), {"test_passes"})
        self.ran("--rerun=here.ttx", "-k", "new", code=5)
        self.assertIn(f"each of the selected tests passed in {self.root / 'here.ttx'}", self.out)

    def test_files_that_are_none(self):
        self.write("tests/test_a.py", TESTS)
        self.write("there.xml", "<testsuites/>")
        for name, why in (("there.xml", "is not a file that --run-file has written"), ("no.ttx", "No such file")):
            with self.subTest(name):
                self.finish(self.start("--rerun", name, stderr=-1), 4)
                self.assertIn(f"--rerun: {self.root / name}", self.stderr)
                self.assertIn(why, self.stderr)


if __name__ == "__main__":
    unittest.main()

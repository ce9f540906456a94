"""Modules that one unit imports are preloaded for the next units of its file, each in a process of its own."""

from kit.project import Project

from torch_testing_ext.common_utils import TestCase, run_tests

SUBJECT = """
import importlib, pathlib, sys, unittest

RARE = "torch.utils.mobile_optimizer"
SEEN = pathlib.Path(__file__).with_name("seen")

class T(unittest.TestCase):
    def look(self):
        with SEEN.open("a") as seen:
            seen.write("there\\n" if RARE in sys.modules else "not there\\n")
        module = importlib.import_module(RARE)
        self.assertFalse(hasattr(module, "touched"))
        module.touched = True

    def test_one(self): self.look()
    def test_two(self): self.look()
    def test_three(self): self.look()
"""


class TestPreloadHints(TestCase):
    def test_modules_are_imported_once(self):
        project = Project()
        self.addCleanup(project.close)
        path = project.write(SUBJECT)
        ran = project.run(path, jobs=1)
        self.assertEqual(set(ran.outcomes.values()), {"passed"}, ran.outcomes)
        seen = (project.root / path).with_name("seen").read_text().splitlines()
        self.assertEqual(seen, ["not there", "there", "there"])


if __name__ == "__main__":
    run_tests()

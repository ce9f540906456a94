"""Modules that one unit imports are preloaded for the next units of its file, each in a process of its own."""

import pytest
from kit.files import subject
from kit.project import Project

from torch_testing_ext.common_utils import TestCase, run_tests

pytestmark = pytest.mark.slow

SUBJECT = subject(__file__, "rare_imports.py")


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

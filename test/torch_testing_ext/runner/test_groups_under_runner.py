"""Nobody has made a group in the processes from which run_test.py forks ranks: gloo counts groups in C++."""

import pytest
from kit.files import subject
from kit.project import Project

from torch_testing_ext.common_utils import TestCase, run_tests

pytestmark = pytest.mark.slow

SUBJECT = subject(__file__, "groups_of_ranks.py")


class TestFirstGroups(TestCase):
    def test_split(self):
        project = Project()
        self.addCleanup(project.close)
        ran = project.run(project.write(SUBJECT), jobs=1)
        self.assertEqual(set(ran.outcomes.values()), {"passed"}, ran.outcomes)


if __name__ == "__main__":
    run_tests()

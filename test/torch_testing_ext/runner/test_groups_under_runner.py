"""Nobody has made a group in the processes from which run_test.py forks ranks: gloo counts groups in C++."""

from kit.project import Project

from torch_testing_ext.common_utils import TestCase, run_tests

SUBJECT = """
import datetime
import torch.distributed as dist
from torch_testing_ext._torch import process_state
from torch_testing_ext.common_distributed import MultiProcessTestCase

class T(MultiProcessTestCase):
    world_size = 2

    def setUp(self):
        super().setUp()
        self._spawn_processes()

    def test_split(self):
        self.assertFalse(process_state.made_groups_before())
        store = dist.FileStore(self.file_name, 2)
        dist.init_process_group("gloo", store=store, rank=self.rank, world_size=2)
        self.assertTrue(process_state.made_groups_before())
        part = dist.group.WORLD.split_group([self.rank], datetime.timedelta(seconds=60))
        self.assertEqual(part.size(), 1)
"""


class TestFirstGroups(TestCase):
    def test_split(self):
        project = Project()
        self.addCleanup(project.close)
        ran = project.run(project.write(SUBJECT), jobs=1)
        self.assertEqual(set(ran.outcomes.values()), {"passed"}, ran.outcomes)


if __name__ == "__main__":
    run_tests()

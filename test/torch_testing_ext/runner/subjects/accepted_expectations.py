from torch_testing_ext.common_distributed import MultiProcessTestCase
from torch_testing_ext.common_utils import TestCase


class RanksTest(MultiProcessTestCase):
    world_size = 2

    def setUp(self):
        super().setUp()
        self._spawn_processes()

    def test_a(self):
        self.assertExpectedInline("a\nb\nc", """wrong""")

    def test_b(self):
        self.assertExpectedInline("d\ne\nf", """wrong""")
        self.assertExpectedInline("g\nh", """wrong""")


class PlainTest(TestCase):
    def test_c(self):
        self.assertExpectedInline("x\ny", """wrong""")

    def test_d(self):
        self.assertExpectedInline("z\nw", """wrong""")

from torch_testing_ext.common_distributed import MultiProcessTestCase
from torch_testing_ext.common_utils import TestCase, run_tests

DISAGREE = False


class Before(TestCase):
    def test_in_one_process(self):
        self.assertExpectedInline("x\ny\nz", """""")


class Subject(MultiProcessTestCase):
    world_size = 3

    def setUp(self):
        super().setUp()
        self._spawn_processes()

    def test_a(self):
        self.assertExpectedInline("one\ntwo\nthree", """""")
        self.assertExpected("in a\nfile")

    def test_b(self):
        self.assertExpectedInline("b", """old""")
        if self.rank == 2:
            self.assertExpectedInline("only rank 2", """""")

    def test_c(self):
        self.assertExpectedInline(f"value {self.rank if DISAGREE else 0}", """""")

    def test_d(self):
        self.assertExpected(f"value {self.rank if DISAGREE else 0}", "d")


if __name__ == "__main__":
    run_tests()

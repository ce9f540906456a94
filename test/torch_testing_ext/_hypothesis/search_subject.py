"""A property without examples, which passes only if a search draws some. test_given.py runs this file."""

from hypothesis import strategies as st

from torch_testing_ext.common_distributed import MultiProcessTestCase
from torch_testing_ext.common_utils import run_tests
from torch_testing_ext.hypothesis_utils import Phase, given, settings


class TestSearch(MultiProcessTestCase):
    world_size = 2

    def setUp(self):
        super().setUp()
        self._spawn_processes()

    @settings(phases=[Phase.explicit], max_examples=3, database=None, derandomize=True)
    @given(n=st.integers(0, 1 << 60))
    def check(self, n):
        self.count = getattr(self, "count", 0) + 1

    def test_number_of_examples(self):
        self.check()
        self.assertEqual(self.count, 120)


if __name__ == "__main__":
    run_tests()

"""Properties by Hypothesis's own `given` in classes with ranks: test_own_given.py runs this file."""

import functools

import torch
import torch.distributed as dist
from hypothesis import Phase, example, given, seed, settings, strategies as st

from torch_testing_ext.common_distributed import MultiProcessTestCase
from torch_testing_ext.common_utils import instantiate_parametrized_tests, parametrize, run_tests
from torch_testing_ext.distributed._tensor.common_dtensor import DTensorTestBase, with_comms

few = settings(max_examples=10, database=None, derandomize=True)
# Of these, two ranks that draw for themselves hardly draw the same.
numbers = st.integers(0, 1 << 40)


def total(number):
    tensor = torch.tensor([number])
    dist.all_reduce(tensor)
    return tensor.item()


class OfMixin:
    @few
    @given(n=numbers)
    def test_of_a_mixin(self, n):
        self.check(n)


class Ranks(MultiProcessTestCase):
    world_size = 2

    def setUp(self):
        super().setUp()
        self._spawn_processes()

    def check(self, n):
        if not dist.is_initialized():
            store = dist.FileStore(self.file_name, self.world_size)
            dist.init_process_group("gloo", store=store, rank=self.rank, world_size=self.world_size)
        self.assertEqual(total(n), self.world_size * n)


@instantiate_parametrized_tests
class SoundTest(OfMixin, Ranks):
    @settings(max_examples=10, database=None)
    @given(n=numbers)
    def test_settings_above(self, n):
        self.check(n)

    @given(numbers)
    @settings(max_examples=10, database=None)
    def test_settings_below(self, n):
        self.check(n)

    @settings(max_examples=10)
    @seed(1)
    @given(n=numbers)
    def test_seed(self, n):
        self.check(n)

    @settings(few, phases=[Phase.explicit])
    @example(n=7)
    @given(n=numbers)
    def test_example(self, n):
        self.check(n)
        self.assertEqual(n, 7)

    @few
    @given(n=numbers, data=st.data())
    def test_data(self, n, data):
        self.check(n + data.draw(numbers))

    @parametrize("more", [0, 3])
    @few
    @given(n=numbers)
    def test_parameters(self, n, more):
        self.check(n + more)

    def test_a_helper(self):
        self.helper()

    @few
    @given(n=numbers)
    def helper(self, n):
        self.check(n)


class InheritedTest(SoundTest):
    world_size = 3


class OfDTensorTest(DTensorTestBase):
    world_size = 2

    @with_comms
    @few
    @given(n=numbers)
    def test_below_with_comms(self, n):
        self.assertEqual(total(n), 2 * n)


class FailingTest(Ranks):
    @settings(max_examples=100, database=None, derandomize=True)
    @given(n=numbers)
    def test_fails(self, n):
        self.check(n)
        self.assertFalse(n >= 17 and self.rank == 1)


class FailingOfDTensorTest(DTensorTestBase):
    world_size = 2

    @with_comms
    @settings(max_examples=100, database=None, derandomize=True)
    @given(n=numbers)
    def test_fails(self, n):
        self.assertLess(total(n), 2 * 17)


def hides(test):
    """A decorator that keeps what it decorates where nobody can replace it."""
    call = functools.partial(test)
    around = functools.wraps(test)(lambda self: call(self))
    return around


class HiddenTest(Ranks):
    @hides
    @few
    @given(n=numbers)
    def test_hidden(self, n):
        self.check(n)


if __name__ == "__main__":
    run_tests()

import torch

from torch_testing_ext.common_utils import TestCase, run_tests


def down(depth):
    return down(depth - 1) if depth else {}["missing"]


class PlainTest(TestCase):
    def test_good(self):
        self.assertEqual(1 + 1, 2)

    def test_equal(self):
        self.assertEqual(torch.arange(6).reshape(2, 3), torch.tensor([[0, 1, 2], [3, 9, 5]]))

    def test_deep(self):
        print("a line of output")
        down(20)


if __name__ == "__main__":
    run_tests()

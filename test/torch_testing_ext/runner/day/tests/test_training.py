from mylib import training
from ranks import RanksTestCase

from torch_testing_ext.common_utils import run_tests


class TrainingTest(RanksTestCase):
    def test_step(self):
        self.join()
        training.step(self.rank)

    def test_two_steps(self):
        self.join()
        for _ in range(2):
            training.step(self.rank)


if __name__ == "__main__":
    run_tests()

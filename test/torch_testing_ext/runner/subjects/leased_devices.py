import os
import unittest

from torch_testing_ext.common_distributed import skip_if_lt_x_gpu
from torch_testing_ext.common_utils import instantiate_parametrized_tests, parametrize


class LeasedTest(unittest.TestCase):
    def hold(self, count):
        devices = os.environ["TESTACC_VISIBLE_DEVICES"].split(",")
        self.assertEqual(len(set(devices)), count)
        self.assertLessEqual(set(devices), {"0", "1", "2"})
        for device in devices:  # fails if another test holds the device
            os.close(os.open(f"held{device}", os.O_CREAT | os.O_EXCL))
        for device in devices:
            os.unlink(f"held{device}")

    @parametrize("number", range(5))
    @skip_if_lt_x_gpu(1)
    def test_one(self, number):
        self.hold(1)

    @parametrize("number", range(5))
    @skip_if_lt_x_gpu(2)
    def test_two(self, number):
        self.hold(2)

    @skip_if_lt_x_gpu(4)
    def test_four(self):
        self.fail("there are three")


instantiate_parametrized_tests(LeasedTest)

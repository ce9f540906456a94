from mylib.missing import nothing  # noqa: F401

from torch_testing_ext.common_utils import TestCase


class ImportTest(TestCase):
    def test_it(self):
        pass

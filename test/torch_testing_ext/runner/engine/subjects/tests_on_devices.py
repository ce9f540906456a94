import unittest


class T(unittest.TestCase):
    def test_first(self):
        pass

    def test_other(self):
        pass

    def test_wide(self):
        pass


for name, devices in (("test_first", 1), ("test_other", 1), ("test_wide", 2)):
    getattr(T, name)._min_gpus_required = devices

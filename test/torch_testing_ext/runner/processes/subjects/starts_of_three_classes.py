import unittest


def setUpModule():
    pass


class One(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        raise unittest.SkipTest("not here")

    def test_a(self):
        pass


class Two(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        raise ValueError("broken")

    def test_b(self):
        pass


class Three(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.addClassCleanup(cls.fail, "its cleanup fails")
        raise unittest.SkipTest("not here")

    fail = classmethod(lambda cls, why: [][0])

    def test_c(self):
        pass

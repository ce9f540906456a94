import pytest

from torch_testing_ext.common_utils import TestCase, run_tests


class CaseTest(TestCase):
    def test_good(self):
        pass


@pytest.mark.world_size(2)
def test_bad(dist_env):
    assert False


class TestPlain:
    def test_bad_too(self):
        assert False


def test_excluded(): ...


test_excluded.__test__ = False

if __name__ == "__main__":
    run_tests()

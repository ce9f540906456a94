"""Names of common_utils and common_cuda do what PyTorch's do: two processes, one for each kit, answer the same."""

import json
from pathlib import Path

import pytest
import torch
from kit.processes import clean_environ
from kit.warm import run_warm

from torch_testing_ext.common_utils import TestCase, instantiate_parametrized_tests, parametrize, run_tests, subtest

pytestmark = pytest.mark.slow

PROBE = Path(__file__).with_name("kit_probe.py")
OURS, THEIRS = "torch_testing_ext", "torch.testing._internal"
VERSION = tuple(int(part) for part in torch.__version__.split(".")[:2])

# Where we differ on purpose: PyTorch's skips after its last try, also if it was not asked to, which hides the failure.
STRICTER = {"retries"}
if VERSION < (2, 13):
    # Older kits lost a class with this decorator, and took the CPU to have no fp8.
    STRICTER |= {"skipIfNoLapack of a class", "PLATFORM_SUPPORTS_FP8", "evaluate_platform_supports_fp8"}
if VERSION < (2, 15):
    STRICTER |= {"libraries"}  # PyTorch's returned the path of a library that does not exist


AT_HOME = {"CI": "", "TEST_CONFIG": ""}


def answers(kit, environment):
    """In a fork of a process that has imported torch, which reads none of these variables; a kit reads them."""
    env = {name: value for name, value in {**clean_environ(), **environment}.items() if value}
    done = run_warm(str(PROBE), kit, cwd=PROBE.parent, env=env)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@instantiate_parametrized_tests
class TestLikePyTorch(TestCase):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.at_home = {kit: answers(kit, AT_HOME) for kit in (OURS, THEIRS)}

    @parametrize(
        "environment",
        [
            subtest(AT_HOME, name="at_home"),
            subtest({"CI": "1", "PYTORCH_TEST_WITH_SLOW_GRADCHECK": "1"}, name="in_ci"),
            subtest(
                {"CI": "1", "TEST_CONFIG": "periodic", "PYTORCH_TESTING_DEVICE_EXCEPT_FOR": "cpu"}, name="periodic"
            ),
        ],
    )
    def test_both_kits_give_the_same(self, environment):
        if environment is AT_HOME:
            theirs, ours = self.at_home[THEIRS], self.at_home[OURS]
        else:
            theirs, ours = answers(THEIRS, environment), answers(OURS, environment)
        lacking = {name for name, answer in theirs.items() if str(answer).startswith("AttributeError")}
        self.assertLess(len(lacking), 0.35 * len(theirs))
        self.assertEqual([name for name, answer in ours.items() if str(answer).startswith("AttributeError")], [])
        compared = theirs.keys() - lacking - STRICTER
        self.assertEqual({name: ours[name] for name in compared}, {name: theirs[name] for name in compared})

    def test_where_we_are_stricter(self):
        ours = self.at_home[OURS]
        self.assertEqual(ours["retries"][1], ["ValueError", 0])
        self.assertEqual(ours["retries"][4], ["SkipTest: Skipping after 3 consecutive m", 0])
        self.assertEqual(ours["libraries"][1], "FileNotFoundError")


if __name__ == "__main__":
    run_tests()

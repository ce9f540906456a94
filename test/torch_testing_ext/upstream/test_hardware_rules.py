"""Files that PyTorch's linter TEST_LINTER refuses are not sent, and files that its list exempts are."""

from __future__ import annotations

import json
import sys
import textwrap
from pathlib import Path

from kit.checkout import CheckoutCase

from torch_testing_ext.common_utils import instantiate_parametrized_tests, parametrize, run_tests, subtest

sys.path.insert(0, str(Path(__file__).parents[3] / "patches"))

import hardware_rules

HEAD = '# Owner(s): ["oncall: distributed"]\nfrom torch.testing._internal.common_utils import run_tests\n'


def suite(kind: str, parameter: str = "device", instantiated: str = "", decorator: str = "") -> str:
    """A class with one test that declares what it needs."""
    declared = f"hw_classification = {kind}" if kind else "pass"
    parameters = f"self, {parameter}" if parameter else "self"
    call = f"instantiate_device_type_tests(T, globals(){instantiated[1:]})" if instantiated else ""
    return (
        f"class T:\n    {declared}\n    {decorator or '# no decorator'}\n    def test_it({parameters}): ...\n{call}\n"
    )


ENUM = "HardwareClassification"
PLANTED = {
    "nothing is declared": (suite("", ""), "T needs hw_classification"),
    "a name of one's own": (suite("CPU"), "T needs hw_classification"),
    "an unknown member": (suite(f"{ENUM}.GPU"), "T needs hw_classification"),
    "generic with a device": (suite(f"{ENUM}.GENERIC"), "T.test_it is GENERIC: remove its parameter"),
    "generic and instantiated": (suite(f"{ENUM}.GENERIC", "", "x"), "T is GENERIC: remove instantiate_device"),
    "not instantiated": (suite(f"{ENUM}.ACCELERATOR"), "T is ACCELERATOR: it needs instantiate_device"),
    "no device": (suite(f"{ENUM}.ACCELERATOR", "", "x"), "T.test_it is ACCELERATOR: it needs a parameter"),
    "only_for of all": (suite(f"{ENUM}.ACCELERATOR", "device", 'x, only_for="cuda"'), "in except_for"),
    "a decorator": (suite(f"{ENUM}.ACCELERATOR", "device", "x", "@onlyCUDA"), "remove @onlyCUDA"),
    "only_for is missing": (suite(f"{ENUM}.CPU", "device", "x"), 'T is CPU: it needs only_for="cpu"'),
    "only_for of another": (suite(f"{ENUM}.CUDA", "device", 'x, only_for=["cpu"]'), 'it needs only_for="cuda"'),
    "only_for of two": (suite(f"{ENUM}.CUDA", "device", 'x, only_for=("cpu", "cuda")'), 'it needs only_for="cuda"'),
    "except_for of one": (suite(f"{ENUM}.XPU", "device", 'x, only_for="xpu", except_for="cpu"'), "remove except_for"),
    "only_for is computed": (suite(f"{ENUM}.MPS", "device", "x, only_for=DEVICES"), 'it needs only_for="mps"'),
}
SOUND = {
    "generic": suite(f"{ENUM}.GENERIC", ""),
    "accelerator": suite(f"{ENUM}.ACCELERATOR", "device", 'x, except_for=["cpu"], allow_xpu=True', "@onlyAccelerator"),
    "one device": suite(f"{ENUM}.CPU", "devices", 'x, only_for=("cpu",)'),
    "annotated": suite(f"{ENUM}.CUDA", "device", 'x, only_for="cuda"').replace(" = ", f": {ENUM} = ", 1),
    "without tests": "class Base:\n    def helper(self): ...\n",
}


@instantiate_parametrized_tests
class HardwareRulesTest(CheckoutCase):
    @parametrize("planted", [subtest(value, name=name.replace(" ", "_")) for name, value in PLANTED.items()])
    def test_names_what_the_linter_refuses(self, planted: tuple[str, str]) -> None:
        source, wanted = planted
        [rule] = hardware_rules.broken_rules(source.encode())
        self.assertIn(wanted, rule)

    @parametrize("source", [subtest(value, name=name.replace(" ", "_")) for name, value in SOUND.items()])
    def test_is_quiet_where_the_linter_is(self, source: str) -> None:
        self.assertEqual(list(hardware_rules.broken_rules(source.encode())), [])

    def test_a_file_that_breaks_a_rule_is_not_sent(self) -> None:
        name = "test/distributed/test_x.py"
        ours = HEAD.replace("torch.testing._internal", "torch_testing_ext") + textwrap.dedent(suite("", ""))
        self.put(self.ours / name, ours)
        self.upstream("patch", "--pytorch", self.pytorch, name)  # this checkout has no such linter
        linter = self.pytorch / "tools" / "linter" / "adapters"
        self.put(linter / "test_linter.py", "")
        _, complaints = self.upstream("patch", "--pytorch", self.pytorch, name, code=1)
        self.assertIn(f"{name}, line 5: T needs hw_classification", complaints)
        self.put(linter / "test_linter_allowlist.json", json.dumps([name]))
        self.upstream("patch", "--pytorch", self.pytorch, name)


if __name__ == "__main__":
    run_tests()

"""Tests that calls that fit PyTorch's functions also fit ours.

A separate process imports PyTorch's modules and prints their signatures.
"""

from __future__ import annotations

import importlib
import inspect
import json
from typing import Any, ClassVar

import torch
from kit.processes import run_python

from torch_testing_ext.common_utils import TestCase, instantiate_parametrized_tests, parametrize, run_tests

MODULES = ["common_distributed", "common_fsdp", "common_dist_composable", "distributed._tensor.common_dtensor"]
# Parts of PyTorch's launch that ours lacks; no test uses them.
NOT_OURS = {"MultiProcessTestCase.Event"}
if torch.__version__ < (2, 12):  # it has no mesh for experts, and the other one another name
    NOT_OURS.add("Transformer.parallelize")

# The same functions inspect both sides: ours here, and PyTorch's in the other process, by their source.


def callables_of(module: Any, name: str) -> dict[str, Any]:
    """The public functions, classes and methods that a module defines, by dotted name."""
    found = {}
    for key, value in vars(module).items():
        if key.startswith("_") or getattr(value, "__module__", None) != name:
            continue
        if inspect.isclass(value):
            found[key] = value
            for member in vars(value):
                if callable(getattr(value, member)) and (member == "__init__" or not member.startswith("_")):
                    found[f"{key}.{member}"] = getattr(value, member)
        elif callable(value):
            found[key] = value
    return found


def parameters_of(function: Any) -> list[list[Any]] | None:
    """The name, kind and whether it is optional, of each parameter; None if Python cannot tell."""
    try:
        given = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return None
    return [[each.name, each.kind.name, each.default is not each.empty] for each in given if each.name != "self"]


PRINT_SIGNATURES = f"""
import importlib, inspect, json, sys
from typing import Any
{inspect.getsource(callables_of)}
{inspect.getsource(parameters_of)}
signatures = {{}}
for name in {MODULES!r}:
    full = "torch.testing._internal." + name
    found = callables_of(importlib.import_module(full), full)
    signatures[name] = {{key: parameters_of(value) for key, value in found.items()}}
print(json.dumps(signatures))
"""


def theirs() -> dict[str, dict[str, list[list[Any]] | None]]:
    done = run_python("-c", PRINT_SIGNATURES)
    if done.returncode:
        raise AssertionError(done.stderr)
    signatures: dict[str, dict[str, list[list[Any]] | None]] = json.loads(done.stdout.splitlines()[-1])
    return signatures


def why_not(wanted: list[list[Any]], given: list[list[Any]]) -> str:
    """Why a call that fits `wanted` may not fit `given`; empty if it fits."""
    kinds = {name: (kind, optional) for name, kind, optional in given}
    for name, kind, optional in wanted:
        if kind.startswith("VAR_"):
            if not any(each == kind for each, _ in kinds.values()):
                return f"does not take {name}"
        elif name not in kinds:
            return f"has no parameter {name}"
        elif kinds[name][0] not in (kind, "POSITIONAL_OR_KEYWORD"):
            return f"takes {name} as {kinds[name][0]}, not {kind}"
        elif optional and not kinds[name][1]:
            return f"requires {name}, which is optional"
    by_position = [name for name, kind, _ in wanted if kind.startswith("POSITIONAL")]
    ours = [name for name, kind, _ in given if kind.startswith("POSITIONAL")]
    if ours[: len(by_position)] != by_position:
        return f"takes its arguments in another order: {ours}"
    known = {name for name, *_ in wanted}
    required = [name for name, kind, optional in given if not optional and name not in known and "VAR_" not in kind]
    return f"also requires {required}" if required else ""


@instantiate_parametrized_tests
class SignaturesTest(TestCase):
    theirs: ClassVar[dict[str, dict[str, list[list[Any]] | None]]]

    @classmethod
    def setUpClass(cls) -> None:
        super().setUpClass()
        cls.theirs = theirs()

    @parametrize("module", MODULES)
    def test_calls_fit(self, module: str) -> None:
        ours = importlib.import_module(f"torch_testing_ext.{module}")
        compared, complaints = 0, {}
        for dotted, wanted in self.theirs[module].items():
            head, _, member = dotted.partition(".")
            thing = getattr(ours, head, None)
            if thing is None or dotted in NOT_OURS:
                continue  # the coverage covers missing names
            if member and not hasattr(thing, member):
                complaints[dotted] = "is missing"
                continue
            given = parameters_of(getattr(thing, member) if member else thing)
            if wanted is not None and given is not None:
                compared += 1
                if why := why_not(wanted, given):
                    complaints[dotted] = why
        self.assertEqual(complaints, {})
        self.assertGreater(compared, 10)

    def test_each_mismatch_is_found(self) -> None:
        def spread(first, second=1, *, third=2, **rest):  # type: ignore[no-untyped-def]
            pass

        wanted = parameters_of(spread)
        assert wanted is not None
        for other, expected in (
            (lambda first, second=1, extra=3, *, third=2, **rest: None, ""),
            (lambda first, second=1, third=2, **rest: None, ""),
            (lambda first, second=1, **rest: None, "has no parameter third"),
            (lambda first, second, *, third=2, **rest: None, "requires second, which is optional"),
            (lambda second=1, first=0, *, third=2, **rest: None, "another order"),
            (lambda first, second=1, *, third=2: None, "does not take rest"),
            (lambda first, second=1, *, third=2, more, **rest: None, "also requires ['more']"),
            (lambda first, *, second=1, third=2, **rest: None, "takes second as KEYWORD_ONLY"),
        ):
            given = parameters_of(other)
            assert given is not None
            reason = why_not(wanted, given)
            self.assertTrue(expected in reason if expected else not reason, f"{given}: {reason}")


if __name__ == "__main__":
    run_tests()

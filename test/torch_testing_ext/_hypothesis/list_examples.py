"""Prints, as JSON, Hypothesis' version and the examples that each suite runs by default. test_replay.py runs this file.

    python list_examples.py [--without-generator] [--without-database]

`--without-generator`: it is an error to draw from Hypothesis. `--without-database`: torch's OpInfo database is another.
"""

import importlib
import json
import sys
import unittest
from pathlib import Path
from types import ModuleType
from unittest import mock

import hypothesis

from torch_testing_ext._hypothesis import hypothesis_internals, property_run, replayed_examples
from torch_testing_ext._hypothesis.property_roles import Leader, Participant

SUITES = Path(__file__).resolve().parents[2] / "distributed"


class Recorder(Leader):
    """Notes the examples that it is given, and runs none."""

    def __init__(self):
        self.seen = []

    def run_example(self, body, drawn):
        self.seen.append(repr(drawn))


def examples_of(case, method):
    """Return the examples of a property as rank 0 runs them."""
    test = getattr(case, method)
    prop = test.__wrapped__
    hypothesis_internals.copy_decorations(test, prop)
    chosen = hypothesis_internals.settings_of(prop)
    replayed = replayed_examples.replayed(prop, case.world_size)
    hypothesis_internals.set_settings(
        prop, property_run._settings_for_ranks(replayed_examples.settings_for(chosen, replayed))
    )
    hypothesis_internals.add_examples(prop, [arguments for _, arguments in replayed or ()])
    recorder = Recorder()
    with mock.patch.object(Participant, "current", recorder):
        prop(case(method))
    return recorder.seen


def main(*options):
    if "--without-generator" in options:
        from hypothesis.internal.conjecture.data import ConjectureData

        mock.patch.object(ConjectureData, "draw", side_effect=AssertionError("an example was drawn")).start()
    if "--without-database" in options:
        other = ModuleType("torch.testing._internal.common_methods_invocations")
        other.op_db = []
        sys.modules[other.__name__] = other
    found = {}
    for file in sorted(SUITES.rglob("test_*.py")):
        if "hypothesis" not in file.read_text():
            continue
        sys.path.insert(0, str(file.parent))
        module = importlib.import_module(file.stem)
        for name, case in vars(module).items():
            if isinstance(case, type) and issubclass(case, unittest.TestCase) and case.__module__ == file.stem:
                for method in unittest.defaultTestLoader.getTestCaseNames(case):
                    if hasattr(getattr(case, method), "hypothesis"):
                        found[f"{file.stem}.{name}.{method}"] = examples_of(case, method)
    print(json.dumps({"hypothesis": hypothesis.__version__, "examples": found}))


if __name__ == "__main__":
    main(*sys.argv[1:])

"""The outcomes of tests: what each counts as, and that no other enumeration says how a test ended."""

import ast
import unittest
from pathlib import Path

import torch_testing_ext
from torch_testing_ext._tests.outcomes import VERDICTS, TestOutcome
from torch_testing_ext.common_utils import run_tests
from torch_testing_ext.launch import RankEnding

PACKAGE = Path(torch_testing_ext.__file__).parent
# Each is about something else than a test: a rank, one example of a property, the exit of a run.
MAY_SHARE_WORDS = {"RankEnding", "ExampleKind", "ExitCode"}


def enumerations(source: str) -> dict[str, set[str]]:
    """The names of the members of each enumeration in a source."""
    found = {}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ClassDef) and any("Enum" in ast.unparse(base) for base in node.bases):
            targets = [target for part in node.body if isinstance(part, ast.Assign) for target in part.targets]
            found[node.name] = {target.id for target in targets if isinstance(target, ast.Name)}
    return found


class OutcomesTest(unittest.TestCase):
    def test_what_each_counts_as(self):
        expected = {
            "PASSED": "PASSED FLAKY LEAKED EXPECTED_FAILURE",
            "FAILED": "FAILED ERROR CRASHED TIMEOUT UNEXPECTED_SUCCESS",
            "SKIPPED": "SKIPPED",
        }
        self.assertEqual([verdict.name for verdict in VERDICTS], [*expected])
        for verdict, names in expected.items():
            for name in names.split():
                self.assertEqual(TestOutcome[name].counts_as.name, verdict)
                self.assertEqual(TestOutcome[name].is_failure, verdict == "FAILED")
        self.assertEqual(sum(len(names.split()) for names in expected.values()), len(TestOutcome))

    def test_endings_of_ranks_have_the_words_of_outcomes(self):
        shared = {ending.name for ending in RankEnding} & {outcome.name for outcome in TestOutcome}
        self.assertEqual(shared, {"PASSED", "SKIPPED", "FAILED", "ERROR"})
        for name in shared:
            self.assertEqual(RankEnding[name].value, TestOutcome[name].value)

    def test_no_other_enumeration_of_outcomes(self):
        """A second one would need tables from one to the other."""
        found = {}
        for file in PACKAGE.rglob("*.py"):
            for name, members in enumerations(file.read_text(encoding="utf-8")).items():
                if len(members & {"PASSED", "FAILED", "ERROR", "SKIPPED"}) > 1:
                    found[name] = str(file.relative_to(PACKAGE))
        self.assertEqual(found.keys(), {"TestOutcome", *MAY_SHARE_WORDS}, found)

    def test_enumerations_are_found(self):
        source = "class A(enum.Enum):\n    PASSED = 1\n    def f(self): ...\nclass B:\n    PASSED = 1\n"
        self.assertEqual(enumerations(source), {"A": {"PASSED"}})


if __name__ == "__main__":
    run_tests()

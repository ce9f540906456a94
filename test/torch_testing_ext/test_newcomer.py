"""A newcomer reads README.md and "Get started" from the top, and sees what they show."""

import pytest
from kit.files import FolderCase
from kit.processes import ROOT
from kit.walkthrough import Walkthrough, printed_as

from torch_testing_ext.common_utils import run_tests

# In the order in which they are read: each goes on where the one before has stopped.
GET_STARTED = ("install", "first-test", "first-failure", "gpus", "ci")


@pytest.mark.slow
class NewcomerTest(FolderCase):
    def test_readme(self) -> None:
        reader = Walkthrough.in_checkout(self.root)
        faults = reader.follow((ROOT / "README.md").read_text(encoding="utf-8"))
        self.assertEqual(faults, [], "\n".join(faults))
        self.assertGreaterEqual(reader.commands, 1)

    def test_get_started(self) -> None:
        reader = Walkthrough.in_checkout(self.root)
        for name in GET_STARTED:
            page = ROOT / "docs" / "get-started" / f"{name}.md"
            with self.subTest(page=name):
                faults = reader.follow(page.read_text(encoding="utf-8"))
                self.assertEqual(faults, [], "\n".join(faults))
        self.assertGreaterEqual(reader.commands, 10)


class PrintedAsTest(FolderCase):
    def test_excerpts(self) -> None:
        printed = "first\nrank 1 failed after 0.31 s\n\n2 passed, 0 failed\n"
        for shown in (
            "first\n",
            "rank 1 failed after 9.99 s\n",
            "first\n...\n2 passed, 0 failed\n",
            "...\n2 passed, 0 failed\n",
            "rank ... failed after 0.1 s\n",
            "",
        ):
            self.assertTrue(printed_as(shown, printed), shown)
        for shown in ("second\n", "rank 1 failed\n", "2 passed\n", "2 passed, 0 failed\n...\nfirst\n"):
            self.assertFalse(printed_as(shown, printed), shown)


if __name__ == "__main__":
    run_tests()

"""Each open fault has the text of an issue: a draft beside its patch, or one that is made of its page."""

import ast
import re
import sys
import unittest
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "docs" / "tools"))

import issue_of_page  # noqa: E402

PAGES = sorted(issue_of_page.FOUND.glob("*.py"))
DRAFTS = "\n".join(file.read_text(encoding="utf-8") for file in (ROOT / "patches" / "issues").glob("*.md"))


class IssueOfPageTest(unittest.TestCase):
    def test_each_page_without_a_draft(self):
        without = [page for page in PAGES if f"docs/found/{page.name}" not in DRAFTS]
        self.assertGreaterEqual(len(without), 10)
        for page in without:
            with self.subTest(page.stem):
                text = issue_of_page.issue(page)
                head, _, rest = text.partition("\n\n### 🐛 Describe the bug\n\n")
                self.assertRegex(head, r"^(New issue: \S.*[.)]|Comment on pytorch/pytorch#\d+)$")
                described, _, program = rest.partition("\n\n```python\n")
                program, _, versions = program.partition("\n```\n\n### Versions\n\n")
                # The cause, or who is hurt, beside the title.
                self.assertGreaterEqual(len(described.split("\n\n")), 2)
                self.assertNotRegex(described, r"Run this file|Found by|Known as|test/distributed|docs/")
                self.assertIn("__main__", program)
                self.assertFalse(ast.get_docstring(ast.parse(program)))
                self.assertRegex(versions, r"^Seen on torch 2\.\d+.*\.$")

    def test_comments_are_on_the_issues_that_are_the_same(self):
        heads = {page.stem: issue_of_page.issue(page).partition("\n")[0] for page in PAGES}
        comments = {name: re.findall(r"#(\d+)$", head) for name, head in heads.items() if head.startswith("Comment")}
        self.assertEqual(comments["item_of_a_partial_sum"], ["166638"])
        self.assertEqual(comments["local_synchronization_and_group_names"], ["173608"])
        self.assertNotIn("zero_join_alone", comments)


if __name__ == "__main__":
    unittest.main()

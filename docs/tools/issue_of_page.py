"""The text that reports a fault of `docs/found` to PyTorch, made of its page: its words, its program, its versions.

    python docs/tools/issue_of_page.py item_of_a_partial_sum

The first line says whether it is a new issue, or a comment on one that PyTorch has; the rest has the form of PyTorch's
template for bugs.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
from collections.abc import Sequence
from pathlib import Path

FOUND = Path(__file__).parents[1] / "found"
_KNOWN = re.compile(r"Known\s+as\s+pytorch/pytorch#(\d+)")
# What a reader of PyTorch's issues has no use for: how a fault was found, and how a page of ours is run.
_OURS = ("Found ", "Run this file", "Seen on ", "Known as ", "Near: ", "patches/")
_SENTENCE = re.compile(r"(?<=\.)\s+(?=[A-Z])")


def issue(page: Path) -> str:
    """The report of the fault that a page shows."""
    source = page.read_text(encoding="utf-8")
    words = ast.get_docstring(ast.parse(source)) or ""
    title, _, text = words.partition("\n")
    program = source.partition('"""')[2].partition('"""')[2].strip()
    known = _KNOWN.search(words)
    kept = [_kept(paragraph) for paragraph in text.strip().split("\n\n")]
    seen = re.search(r"Seen on torch .*?(?:\.(?=\s)|$)", words, re.DOTALL)
    head = f"Comment on pytorch/pytorch#{known[1]}" if known else f"New issue: {title}"
    parts = [
        head,
        "### 🐛 Describe the bug",
        title,
        *filter(None, kept),
        f"```python\n{program}\n```",
        "### Versions",
        " ".join(seen[0].split()) if seen else "",
    ]
    return "\n\n".join(parts)


def _kept(paragraph: str) -> str:
    """The sentences of a paragraph that are about torch alone."""
    sentences = _SENTENCE.split(" ".join(paragraph.split()))
    return " ".join(each for each in sentences if not each.startswith(_OURS))


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("page", choices=sorted(page.stem for page in FOUND.glob("*.py")), metavar="PAGE")
    print(issue(FOUND / f"{parser.parse_args(words).page}.py"))
    return 0


if __name__ == "__main__":
    sys.exit(main())

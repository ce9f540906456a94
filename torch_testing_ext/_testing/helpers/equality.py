"""The comparison behind `TestCase.assertEqual`.

Containers are walked first, so that a wrong length or key is reported before any value; then every pair of leaves is
compared. The result is a text that names the item that differs, or None. A comparison that makes no sense (three
elements against one number, a DTensor against a plain tensor) is an error, not a difference.

The rules of equality, and the phrases by which a test may recognise a failure, are PyTorch's.
"""

from typing import Any

from .equal_containers import LISTED_ITEMS, SHORT, Different, as_tensor_beside, walk
from .equal_leaves import compare_all
from .equal_tensors import are_dtensors, layout_difference
from .equality_rules import ItemPath, Rules, place, spell

SHORT.maxstring = SHORT.maxother = 100


def find_difference(actual: Any, expected: Any, rules: Rules) -> str | None:
    """Describe the first difference; None where the values are equal."""
    actual, expected = as_tensor_beside(actual, expected), as_tensor_beside(expected, actual)
    if are_dtensors(actual, expected):
        layout = layout_difference(actual, expected)
        if layout is not None:
            return layout
        actual, expected = actual.to_local(), expected.to_local()
    try:
        leaves = list(walk(actual, expected, ()))
    except Different as different:
        return different.text + place(different.path)
    differences = list(compare_all(leaves, rules))
    if not differences:
        return None
    (path, text), *others = differences
    paths_of_others = [path for path, _ in others]
    return text + place(path) + _others(paths_of_others, len(leaves))


def _others(paths: list[ItemPath], total: int) -> str:
    if not paths:
        return ""
    listed = ", ".join(spell(path) for path in paths[:LISTED_ITEMS])
    more = ", ..." if len(paths) > LISTED_ITEMS else ""
    return f"\n{len(paths) + 1} of {total} items differ; the others are {listed}{more}"

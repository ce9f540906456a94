"""Which tests may have ranks on several nodes of a cluster, and why others that are marked for it may not."""

from __future__ import annotations

from typing import Any

from .unit_spec import SpanOfNodes


def may_span(test: Any, method: Any, span: SpanOfNodes) -> bool:
    """Whether the ranks of a test may be on several nodes: they are processes, which our base class starts."""
    from torch_testing_ext._marks.nodes import is_multi_node

    return (span.is_default or is_multi_node(method, type(test))) and not _obstacle(test)


def why_one_node(test: Any, method: Any) -> str:
    """Why a test that is marked for several nodes stays on one; empty if it does not, or is not marked."""
    from torch_testing_ext._marks.nodes import is_multi_node

    return _obstacle(test) if is_multi_node(method, type(test)) else ""


def why_one_node_by_pytest(item: Any, case: Any) -> str:
    """As above, for a test that pytest runs. `case`: the test case, if it is the method of one."""
    from torch_testing_ext._marks.nodes import is_multi_node

    targets = (getattr(item, "function", None), getattr(item, "cls", None), *([] if case is None else [type(case)]))
    return "pytest runs it" if is_multi_node(*targets) else ""


def _obstacle(test: Any) -> str:
    from torch_testing_ext._cases.continuous import MultiProcContinuousTest
    from torch_testing_ext._cases.multi_process import MultiProcessTestCase
    from torch_testing_ext._cases.multi_threaded import MultiThreadedTestCase

    if isinstance(test, MultiProcContinuousTest):
        return "its ranks persist for a class"
    if isinstance(test, MultiThreadedTestCase):
        return "its ranks are threads"
    if not isinstance(test, MultiProcessTestCase):
        return "it is no MultiProcessTestCase"
    return "" if type(test)._starts_ranks_as_usual() else "its class starts its ranks itself"

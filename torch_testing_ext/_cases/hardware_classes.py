"""The kind of hardware that a test class is for, as its attribute `hw_classification`, and tests selected by it."""

from __future__ import annotations

import unittest
from collections.abc import Callable, Iterable, Iterator
from enum import Enum
from typing import Any


class HardwareClassification(Enum):
    """The hardware that a test class is for: any (GENERIC), every accelerator, or devices of one type."""

    GENERIC = "generic"
    ACCELERATOR = "accelerator"
    CPU = "cpu"
    CUDA = "cuda"
    MPS = "mps"
    XPU = "xpu"


def get_hw_classification(test_case_cls: type) -> HardwareClassification | None:
    """Return a test class's own declaration; None without one."""
    found = getattr(test_case_cls, "hw_classification", None)
    if found is None or isinstance(found, HardwareClassification):
        return found
    name = f"{test_case_cls.__module__}.{test_case_cls.__name__}"
    raise TypeError(f"{name}.hw_classification must be a HardwareClassification")


def filter_by_hw_classification(
    items: Iterable[Any],
    requirement: set[HardwareClassification],
    get_class: Callable[[Any], type | None],
    *,
    on_match: Callable[[Any], None],
) -> None:
    """Pass the items whose class has one of these declarations to `on_match`, and print how many there are."""
    counts = dict.fromkeys(("total", "passed", "unclassified", "no_class", "mismatched"), 0)
    for item in items:
        counts["total"] += 1
        cls = get_class(item)
        classification = None if cls is None else get_hw_classification(cls)
        if cls is None:
            counts["no_class"] += 1
        elif classification is None:
            counts["unclassified"] += 1
        elif classification in requirement:
            counts["passed"] += 1
            on_match(item)
        else:
            counts["mismatched"] += 1
    if not counts["no_class"]:
        del counts["no_class"]
    numbers = ", ".join(f"{name}={count}" for name, count in counts.items())
    print(f"HW classification mode active ({[one.name for one in requirement]}): {numbers}")


class HardwareClassificationTestLoader(unittest.TestLoader):
    """Loads only tests whose class has one of these declarations; all tests if `hw_classification` is None."""

    def __init__(self, hw_classification: set[HardwareClassification] | None) -> None:
        super().__init__()
        self.hw_classification = hw_classification

    @staticmethod
    def iter_test_cases_recursively(suite_or_case: Any) -> Iterator[Any]:
        try:
            parts = iter(suite_or_case)
        except TypeError:
            yield suite_or_case
            return
        for part in parts:
            yield from HardwareClassificationTestLoader.iter_test_cases_recursively(part)

    def get_filtered_suite(self, tests: Any) -> Any:
        if self.hw_classification is None:
            return tests
        # A name that cannot be loaded is a test of its own, which fails with the reason: it must not be left out.
        failing: Any = unittest.loader._FailedTest  # type: ignore[attr-defined]
        wanted: list[Any] = []
        cases = list(self.iter_test_cases_recursively(tests))
        broken = [case for case in cases if isinstance(case, failing)]
        rest = [case for case in cases if not isinstance(case, failing)]
        filter_by_hw_classification(rest, self.hw_classification, type, on_match=wanted.append)
        return self.suiteClass([*broken, *wanted])

    def loadTestsFromModule(self, module: Any, *args: Any, **kwargs: Any) -> Any:
        return self.get_filtered_suite(super().loadTestsFromModule(module, *args, **kwargs))

    def loadTestsFromNames(self, names: Any, module: Any = None) -> Any:
        suites = unittest.TestLoader.loadTestsFromNames(_unfiltered(self), names, module)
        return self.get_filtered_suite(suites)

    def loadTestsFromName(self, name: str, module: Any = None) -> Any:
        return self.get_filtered_suite(unittest.TestLoader.loadTestsFromName(_unfiltered(self), name, module))


def _unfiltered(loader: HardwareClassificationTestLoader) -> unittest.TestLoader:
    """A loader with the same settings, so that tests are counted once."""
    plain = unittest.TestLoader()
    for name in ("testMethodPrefix", "sortTestMethodsUsing", "testNamePatterns", "suiteClass"):
        setattr(plain, name, getattr(loader, name))
    return plain

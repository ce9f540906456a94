"""The common base of tests that run in ranks, whether these are fresh processes, persistent processes or threads."""

import inspect
import os
import unittest
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any, ClassVar

from torch_testing_ext import launch
from torch_testing_ext._process import setting_names
from torch_testing_ext._testing.bases.invocation import case_of_test
from torch_testing_ext._testing.bases.rank_accounts import account_for_error, may_skip, subtests_of
from torch_testing_ext._testing.bases.rank_verdicts import RankError, rank_error
from torch_testing_ext._testing.bases.test_case import TestCase
from torch_testing_ext._testing.marks.needs import TestSkip, first_unmet, is_ours
from torch_testing_ext._testing.marks.settings_of_tests import kinds_of_test, may_differ, timeout_of
from torch_testing_ext.launch.aspects.faults import plan_on
from torch_testing_ext.launch.aspects.world import SIZE
from torch_testing_ext.launch.attempts import TestPlan
from torch_testing_ext.launch.most_ranks import too_many

# Keeps these frames out of tracebacks: the message is complete.
__unittest = True


def _number(text: str) -> float:
    """Convert to an int if it is one, as in PyTorch."""
    value = float(text)
    return int(value) if value.is_integer() else value


# The `rank` of the test case that waits for the ranks.
PARENT = -1
DEFAULT_WORLD_SIZE = 4
# A wrong value fails each test when its ranks start: see launch/launch_settings.py.
TIMEOUT_DEFAULT: float = 300
with suppress(ValueError):
    TIMEOUT_DEFAULT = _number(os.getenv(setting_names.DEFAULT_TIMEOUT, "300"))
TIMEOUT_OVERRIDE: dict[str, float] = {"test_ddp_uneven_inputs": 400, "test_DistributedDataParallel": 500}


def get_timeout(test_id: str) -> float:
    """Return the timeout of a test in seconds: its own, by the last part of its id, or the default."""
    return TIMEOUT_OVERRIDE.get(test_id.split(".")[-1], TIMEOUT_DEFAULT)


def checked_world_size(given: Any, name: str) -> int:
    """Convert a world size, a number or a string of digits, to a number; `name` is for the error."""
    __tracebackhide__ = True
    try:
        size = int(given)
    except (TypeError, ValueError):
        size = 0
    if size < 1 or (size != given and not isinstance(given, str)):
        raise ValueError(f"{name} is {given!r}; it must be a number of ranks, 1 or more")
    if why := too_many(size):
        raise ValueError(f"{name} is {size}; {why}")
    return size


# Called with the class of each test that is made, before it looks for its method.
before_tests: list[Callable[[type], None]] = []


class _LocalRank:
    """The property `local_rank`, in place of which a test may set an attribute of its own."""

    def __get__(self, test: Any, owner: type | None = None) -> Any:
        return self if test is None else launch.local_rank_of(test.rank)


class RankedTestCase(TestCase):
    """A test case whose test methods run in ranks; in the parent, each is replaced by one that waits for them."""

    # A subclass that overrides one of these decides itself, in the ranks or from their ends, whether the test skips.
    _DECIDES_ABOUT_SKIPS: ClassVar[tuple[str, ...]] = ("_handle_test_skip",)

    rank: int
    # The number of machines of the ranks, as far as they can tell.
    nodes: int = 1
    # Among the ranks of its node; in the parent, as `rank`.
    local_rank: Any = _LocalRank()
    _result: Any = None
    # Whether each rank is a process.
    _has_own_calls = True

    def __init__(self, method_name: str = "runTest", methodName: str = "runTest") -> None:
        name = method_name if methodName == "runTest" else methodName
        super().__init__(name)
        for prepare in before_tests:
            prepare(type(self))
        test = getattr(self, name, None)
        if test is not None:
            setattr(self, name, self._replacement_for(test))
        elif name != "runTest":
            raise ValueError(f"{type(self).__qualname__} has no test method {name!r}")

    def _replacement_for(self, test: Callable[[], Any]) -> Any:
        """Return the method that replaces a test: in the parent it waits for the ranks, in a rank it runs the test."""
        return self.join_or_run(test)

    def join_or_run(self, fn: Callable[[], Any]) -> Any:
        raise NotImplementedError

    @property
    def world_size(self) -> int:
        return DEFAULT_WORLD_SIZE

    def traffic(self, model: Any = None) -> AbstractContextManager[Any]:
        """In a rank: record the communication of the block: `with self.traffic(model) as seen`."""
        from torch_testing_ext._testing.bases.traffic_blocks import TrafficError, traffic_of

        if not self._has_own_calls:
            raise TrafficError("ranks that are threads share the calls of their process")
        kind = type(self)
        return traffic_of(f"{Path(inspect.getfile(kind)).name}::{kind.__qualname__}::{self._testMethodName}", model)

    def _is_rank(self) -> bool:
        return getattr(self, "rank", PARENT) != PARENT

    # -- the parent

    def run(self, result: Any = None) -> Any:
        self._result = result
        self._prepare_ranks()
        return super().run(result)

    def _prepare_ranks(self) -> None:
        """Called before the test's setUp."""

    def _known_skip(self) -> TestSkip | None:
        """Return the skip of all ranks, if it is certain: then none need be started."""
        if self._decides_about_skips():
            return None
        return first_unmet(getattr(self, self._name_in_ranks(), None))

    def _name_in_ranks(self) -> str:
        return str(self._testMethodName)

    @classmethod
    def _decides_about_skips(cls) -> bool:
        return cls._overrides(*cls._DECIDES_ABOUT_SKIPS)

    @classmethod
    def _overrides(cls, *names: str) -> bool:
        """Whether the class has one of these from outside this package."""
        for name in names:
            member = inspect.getattr_static(cls, name, None)
            if member is not None and not is_ours(getattr(member, "__func__", member)):
                return True
        return False

    def _error(self, message: str) -> RankError:
        return rank_error(launch.Verdict(launch.TestOutcome.ERROR, message), self)

    def _checked_world_size(self) -> int:
        return checked_world_size(self.world_size, f"{type(self).__qualname__}.world_size")

    @classmethod
    def _checked_nodes(cls) -> int:
        nodes: Any = cls.nodes
        if isinstance(nodes, bool) or not isinstance(nodes, int) or nodes < 1:
            raise ValueError(f"{cls.__qualname__}.nodes is {nodes!r}; it must be a number of nodes, 1 or more")
        return nodes

    def _case(self) -> launch.Case:
        return case_of_test(self, self._result)

    def _timeout(self) -> float:
        return timeout_of(self) or get_timeout(self.id())

    def _collectives_may_differ(self) -> bool:
        return may_differ(getattr(self, self._testMethodName, None), self)

    def _skip_before_ranks(self) -> TestSkip | None:
        """Return the skip of all ranks, if it is certain, where the test is to run.

        A class that wants a device for each rank needs none in a whole world: only what the test itself needs counts.
        """
        in_world = SIZE.value() is not None
        return RankedTestCase._known_skip(self) if in_world else self._known_skip()

    def _plan(self) -> TestPlan:
        """The plan of this test for its ranks. What `setUp` has yet to decide is told when they are waited for."""
        world = SIZE.value()
        return TestPlan(
            self._case(),
            self._checked_world_size() if world is None else world,
            self._timeout(),
            launch.Expected(may_differ=self._collectives_may_differ()),
            kinds=kinds_of_test(self),
            faults=plan_on(getattr(self, self._testMethodName, None)),
            is_whole_test=True,
            judges_itself=self._overrides("_check_return_codes"),
            keeps_port=True,
            nodes=self._checked_nodes(),
            folder=self.id(),
        )

    def _has_own_ranks(self) -> bool:
        """Whether the test starts its ranks: a launcher has started its own, and those of a whole world are forks."""
        return launch.this_launch() is None and SIZE.value() is None

    def _short_name(self) -> str:
        return f"{type(self).__qualname__}.{self._testMethodName}"

    # -- a rank

    def _accepts_expected(self) -> bool:
        """The parent accepts for ranks that are processes; of ranks that are threads, rank 0 accepts."""
        return self._recorder is None and self.rank <= 0

    @contextmanager
    def subTest(self, msg: Any = None, **params: Any) -> Iterator[None]:
        """In a rank, a failing subtest ends the test and names its parameters: if the rank went on, the other ranks
        would hang in the collectives that it skipped."""
        if not self._is_rank():
            with super().subTest(*([] if msg is None else [msg]), **params):
                yield
            return
        try:
            yield
        except unittest.SkipTest:
            pass
        except Exception as error:
            subtests_of(error).insert(0, _describe_subtest(msg, params))
            raise


def _describe_subtest(msg: Any, params: dict[str, Any]) -> str:
    parts = []
    if msg is not None:
        parts.append(f"[{msg}]")
    if params:
        values = ", ".join(f"{name}={value!r}" for name, value in params.items())
        parts.append(f"({values})")
    return " ".join(parts)


@contextmanager
def own_cleanups(test: unittest.TestCase, account: launch.AccountWriter | None = None) -> Iterator[None]:
    """Run the cleanups of a test, last first. The first error counts; a skip or an exit only where there is none.

    An error of the test itself is in its `account` before: a cleanup may end the process.
    """
    errors: list[BaseException] = []
    registered: list[Any] = test._cleanups  # type: ignore[attr-defined]
    try:
        yield
    except BaseException as error:
        errors.append(error)
        if account is not None and isinstance(error, Exception) and not may_skip(error):
            account_for_error(account, error, test.failureException)
    while registered:
        function, args, kwargs = registered.pop()
        try:
            function(*args, **kwargs)
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            errors.append(error)
    if errors:
        raise next((error for error in errors if not may_skip(error)), errors[0])

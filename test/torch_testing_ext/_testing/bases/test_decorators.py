"""Skips and other decorators: the parent can read their needs, and a skip starts no process."""

import functools
import os
import sys
import unittest
from unittest import mock

import torch
import torch.distributed as dist
from kit.outcomes import outcome_of
from kit.ranks import Ranks, ranks_told

from torch_testing_ext import common_distributed as cd
from torch_testing_ext._machine import accelerators
from torch_testing_ext._testing.marks import platform_needs
from torch_testing_ext.common_utils import TestCase, instantiate_parametrized_tests, parametrize, run_tests
from torch_testing_ext.distributed._tensor.common_dtensor import skip_unless_torch_gpu


class Launched(Exception):
    """Raised instead of starting processes."""


def devices(count, kind="cuda"):
    """Simulate a machine with this many accelerators."""
    stack = mock.patch.multiple(
        accelerators, device_count=lambda: count, accelerator_type=lambda: kind if count else None
    )
    return stack


def outcome_under(decorator, count=0, **environ):
    """Run a decorated test in the parent, on a machine with `count` accelerators: return "run", or its skip."""
    with devices(count), mock.patch.dict(os.environ, environ):

        class Decorated(Ranks):
            @decorator
            def method(self):
                pass

        with mock.patch("torch_testing_ext.launch.launch", side_effect=Launched) as launch:
            seen = outcome_of(Decorated("method"))
    if seen.outcome == "skipped":
        assert not launch.called, "processes were started for a test that is skipped"
        return seen.message
    assert "Launched" in seen.message, seen
    return "run"


def called_under(decorator, count=0, **environ):
    """Call the decorated function itself, as a rank does: return "run", or the exit code of its skip."""
    with devices(count), mock.patch.dict(os.environ, environ):
        try:
            return decorator(lambda self: "run")(None)
        except unittest.SkipTest as skip:
            return getattr(skip, "exit_code", 86)


class TestDevices(TestCase):
    def test_skip_if_lt_x_gpu(self):
        for wanted in (1, 2, 4, 8, 9, 16):
            for count in (0, 1, 2, 8):
                for allow_cpu in (False, True):
                    with self.subTest(wanted=wanted, count=count, allow_cpu=allow_cpu):
                        decorator = cd.skip_if_lt_x_gpu(wanted, allow_cpu=allow_cpu)
                        runs = count >= wanted or (allow_cpu and count == 0)
                        message = f"Need at least {wanted} accelerator device{'s' if wanted > 1 else ''}"
                        self.assertEqual(outcome_under(decorator, count), "run" if runs else message)
                        code = cd.TEST_SKIPS.get(f"multi-gpu-{wanted}", cd.TEST_SKIPS["generic"]).exit_code
                        self.assertEqual(called_under(decorator, count), "run" if runs else code)

    def test_allow_cpu_is_by_keyword(self):
        with self.assertRaises(TypeError):
            cd.skip_if_lt_x_gpu(2, True)

    def test_skip_if_no_gpu(self):
        table = [(0, "4", 89), (1, "4", 81), (4, "4", "run"), (8, "4", "run"), (8, "16", 86)]
        for count, world_size, expected in table:
            with self.subTest(count=count, world_size=world_size):
                self.assertEqual(called_under(cd.skip_if_no_gpu, count, WORLD_SIZE=world_size), expected)
                outcome = outcome_under(cd.skip_if_no_gpu, count, WORLD_SIZE=world_size)
                self.assertEqual(outcome == "run", expected == "run", outcome)

    def test_by_backend(self):
        for count in (0, 1, 2):
            for decorate in (
                cd.nccl_skip_if_lt_x_gpu,
                lambda backend, n: cd.require_n_gpus_for_nccl_backend(n, backend),
            ):
                self.assertEqual(called_under(decorate("gloo", 2), count), "run")
                self.assertEqual(called_under(decorate("nccl", 2), count), "run" if count >= 2 else 77)
        self.assertEqual(
            outcome_under(cd.require_n_gpus_for_nccl_backend(n=2, backend="nccl"), 1)[:15], "Need at least 2"
        )
        self.assertEqual(outcome_under(cd.nccl_skip_if_lt_x_gpu(backend="nccl", x=2), 1)[:15], "Need at least 2")

    def test_requires_world_size(self):
        self.assertEqual(outcome_under(cd.requires_world_size(3), 2), "requires 3 accelerators, found 2")
        self.assertEqual(outcome_under(cd.requires_world_size(n=3), 3), "run")
        self.assertEqual(called_under(cd.requires_world_size(3), 2), 80)

    def test_at_least_x_gpu(self):
        for count in (0, 1, 8):
            with devices(count):
                self.assertEqual([cd.at_least_x_gpu(x) for x in (0, 1, 2, 8)], [count >= x for x in (1, 1, 2, 8)])

    def test_a_class_may_handle_skips_itself(self):
        handled = []

        class Persistent:
            def _handle_test_skip(self, message):
                handled.append(message)

            @cd.skip_if_lt_x_gpu(2)
            def method(self):
                raise AssertionError("run")

        with devices(1):
            self.assertIsNone(Persistent().method())
        self.assertEqual(handled, ["Need at least 2 accelerator devices"])

    def test_init_multigpu_helper(self):
        table = [
            (8, 2, {0: [0], 1: [1]}),
            (2, 2, {0: [0], 1: [1]}),
            (0, 2, {0: [], 1: []}),
            (1, 2, {0: [], 1: []}),
        ]
        for count, world_size, expected in table:
            with self.subTest(count=count), devices(count):
                self.assertEqual(cd.init_multigpu_helper(world_size, "nccl"), expected)


class TestWorldSize(TestCase):
    def test_table(self):
        table = [
            (cd.skip_if_small_worldsize, "4", "gloo", 73),
            (cd.skip_if_small_worldsize, "8", "gloo", "run"),
            (cd.skip_if_small_worldsize, "4", "mpi", "run"),
            (cd.skip_if_odd_worldsize, "3", "gloo", 87),
            (cd.skip_if_odd_worldsize, "4", "gloo", "run"),
            (cd.skip_if_odd_worldsize, "3", "mpi", "run"),
        ]
        for decorator, size, backend, expected in table:
            with self.subTest(decorator=decorator.__name__, size=size, backend=backend):
                self.assertEqual(called_under(decorator, WORLD_SIZE=size, BACKEND=backend), expected)
                outcome = outcome_under(decorator, WORLD_SIZE=size, BACKEND=backend)
                self.assertEqual(outcome == "run", expected == "run", outcome)

    def test_get_required_world_size(self):
        class Sized(Ranks):
            @property
            def world_size(self):
                return cd.get_required_world_size(self, 2)

            @cd.requires_world_size(3)
            def three(self):
                pass

            def any_number(self):
                self.tell(self.world_size)

        self.assertEqual(Sized("three").world_size, 3)
        self.assertEqual(Sized("any_number").world_size, 2)
        self.assertEqual(ranks_told(Sized("any_number")), [2, 2])

        class Plain(unittest.TestCase):
            three = Sized.three

        self.assertEqual(cd.get_required_world_size(Plain("three"), 5), 3)
        self.assertEqual(cd.get_required_world_size(object(), 5), 5)


class TestBackends(TestCase):
    def check(self, name, decorate, available, reason):
        with mock.patch.object(dist, f"is_{name}_available", lambda: available):
            decorator = decorate()
        outcome = outcome_under(decorator)
        self.assertEqual(outcome, "run" if available else reason)

        @decorator
        class Whole(unittest.TestCase):
            def runTest(self):
                pass

        self.assertEqual(outcome_of(Whole()).outcome, "passed" if available else "skipped")
        self.assertEqual([need.backend for need in cd.needs_of(Whole)], [name])

    def test_requires_a_backend(self):
        for name in ("gloo", "nccl", "ucc", "mpi", "xccl"):
            for available in (False, True):
                with self.subTest(name=name, available=available):
                    reason = f"c10d was not compiled with the {name.upper()} backend"
                    self.check(name, getattr(cd, f"requires_{name}"), available, reason)

    def test_requires_accelerator_dist_backend(self):
        table = [
            (None, (), 0, False),
            (None, ("nccl",), 0, True),
            (None, ("xccl",), 0, True),
            (["xccl"], ("nccl",), 0, False),
            (["nccl"], ("nccl",), 0, True),
            (["gloo"], ("nccl",), 0, False),
            ([], ("nccl",), 0, False),
        ]
        for asked, here, count, runs in table:
            with (
                self.subTest(asked=asked, here=here),
                mock.patch.object(dist, "is_nccl_available", lambda here=here: "nccl" in here),
                mock.patch.object(dist, "is_xccl_available", lambda here=here: "xccl" in here),
            ):
                with devices(count):
                    decorator = cd.requires_accelerator_dist_backend(asked)
                self.assertEqual(outcome_under(decorator) == "run", runs)
        with devices(1, "hpu"), mock.patch.object(dist, "is_nccl_available", lambda: False):
            self.assertEqual(outcome_under(cd.requires_accelerator_dist_backend(["hccl"])), "run")

    def test_requires_nccl_version(self):
        table = [
            # accelerator, NCCL there, its version
            (None, True, (2, 10), "run"),
            ("xpu", True, (2, 10), "run"),
            ("cuda", False, None, "c10d was not compiled with the NCCL backend"),
            ("cuda", True, (2, 10), "Requires NCCL (2, 17) or newer, found (2, 10): for a reason"),
            ("cuda", True, (2, 17), "run"),
            ("cuda", True, (2, 20, 1), "run"),
        ]
        for kind, available, version, expected in table:
            with self.subTest(kind=kind, available=available, version=version):
                with (
                    devices(int(kind is not None), kind),
                    mock.patch.object(dist, "is_nccl_available", lambda available=available: available),
                    mock.patch("torch.cuda.nccl.version", lambda version=version: version),
                ):
                    decorator = cd.requires_nccl_version((2, 17), "for a reason")
                self.assertEqual(outcome_under(decorator), expected)


class TestPlatforms(TestCase):
    def test_rocm(self):
        for decorator in (cd.skip_if_rocm, cd.skip_if_rocm_multiprocess):
            with mock.patch.object(torch.version, "hip", "6.0"):
                self.assertEqual(outcome_under(decorator), cd.TEST_SKIPS["skipIfRocm"].message)
            with mock.patch.object(torch.version, "hip", None):
                self.assertEqual(outcome_under(decorator), "run")

    def test_win32(self):
        with mock.patch.object(sys, "platform", "win32"):
            decorator = cd.skip_if_win32()
        self.assertIn("Windows", outcome_under(decorator))
        self.assertEqual(outcome_under(cd.skip_if_win32()), "run")

    def test_transformers(self):
        for found, expected in ((None, 88), (object(), "run")):
            with mock.patch.object(platform_needs, "find_spec", lambda name, found=found: found):
                self.assertEqual(called_under(cd.import_transformers_or_skip()), expected)
                self.assertEqual(outcome_under(cd.import_transformers_or_skip()) == "run", expected == "run")

    def test_the_table_of_skips(self):
        codes = {name: skip.exit_code for name, skip in cd.TEST_SKIPS.items()}
        single = {
            "backend_unavailable": 72,
            "small_worldsize": 73,
            "no_cuda": 74,
            "nccl": 76,
            "skipIfRocm": 78,
            "no_peer_access": 79,
            "generic": 86,
            "odd_worldsize": 87,
            "importerror": 88,
            "no_accelerator": 89,
        }
        for kind in ("multi-gpu", "multi-device"):
            single |= {f"{kind}-1": 75, f"{kind}-2": 77} | {f"{kind}-{n}": 77 + n for n in range(3, 9)}
        self.assertEqual(codes, single)


class TestNeeds(TestCase):
    """Needs can be read from the function, even under other decorators."""

    def test_each(self):
        table = [
            (cd.skip_if_lt_x_gpu(3), 3, False, None, None),
            (cd.skip_if_lt_x_gpu(3, allow_cpu=True), 3, True, None, None),
            (cd.skip_if_no_gpu, 1, False, None, None),
            (cd.nccl_skip_if_lt_x_gpu("nccl", 2), 2, False, None, None),
            (cd.require_n_gpus_for_nccl_backend(2, "nccl"), 2, False, None, None),
            (cd.requires_world_size(4), 4, False, None, 4),
            (cd.requires_gloo(), 0, False, "gloo", None),
            (cd.requires_nccl(), 0, False, "nccl", None),
            (cd.skip_if_small_worldsize, 0, False, None, None),
        ]
        for decorator, count, allow_cpu, backend, world_size in table:
            (need,) = cd.needs_of(decorator(lambda self: None))
            found = (need.devices, need.allow_cpu, need.backend, need.world_size)
            self.assertEqual(found, (count, allow_cpu, backend, world_size))

    def test_none(self):
        self.assertEqual(cd.needs_of(lambda: None), ())
        self.assertEqual(cd.needs_of(cd.nccl_skip_if_lt_x_gpu("gloo", 2)(lambda: None)), ())

    def test_several_outermost_first(self):
        @cd.requires_gloo()
        @cd.skip_if_lt_x_gpu(4)
        @cd.skip_if_lt_x_gpu(2)
        def function(self):
            pass

        self.assertEqual(
            [(need.backend, need.devices) for need in cd.needs_of(function)], [("gloo", 0), (None, 4), (None, 2)]
        )

    def test_under_other_decorators(self):
        def other(function):
            @functools.wraps(function)
            def wrapper(*args, **kwargs):
                return function(*args, **kwargs)

            return wrapper

        function = other(cd.with_nccl_blocking_wait(cd.skip_if_lt_x_gpu(2)(lambda self: None)))
        self.assertEqual([need.devices for need in cd.needs_of(function)], [2])
        ours = cd.with_nccl_blocking_wait
        self.assertEqual(outcome_under(lambda method: ours(cd.skip_if_lt_x_gpu(2)(method)), 1)[:15], "Need at least 2")
        # A decorator that we do not know may call the test differently: the ranks decide.
        self.assertEqual(outcome_under(lambda method: other(cd.skip_if_lt_x_gpu(2)(method)), 1), "run")

    def test_of_a_test_method(self):
        class Decorated(Ranks):
            @cd.skip_if_lt_x_gpu(2)
            def method(self):
                pass

        self.assertEqual([need.devices for need in cd.needs_of(Decorated.method)], [2])
        self.assertEqual([need.devices for need in cd.needs_of(Decorated("method").method)], [2])

    def test_of_a_parametrized_test(self):
        class Parametrized(TestCase):
            @cd.skip_if_lt_x_gpu(2)
            @parametrize("flag", [False, True])
            def test_it(self, flag):
                pass

        instantiate_parametrized_tests(Parametrized)
        names = [name for name in dir(Parametrized) if name.startswith("test_it")]
        self.assertEqual(len(names), 2)
        for name in names:
            self.assertEqual([need.devices for need in cd.needs_of(getattr(Parametrized, name))], [2])

    def test_min_gpus_required(self):
        """PyTorch's own tools read this attribute."""
        self.assertEqual(cd.skip_if_lt_x_gpu(3)(lambda self: None)._min_gpus_required, 3)
        self.assertEqual(cd.requires_world_size(3)(lambda self: None)._min_gpus_required, 3)
        self.assertEqual(cd.requires_world_size(3)(lambda self: None)._required_world_size, 3)
        self.assertEqual(cd.nccl_skip_if_lt_x_gpu("nccl", 3)(lambda self: None)._min_gpus_required, 3)
        self.assertEqual(cd.require_n_gpus_for_nccl_backend(3, "nccl")(lambda self: None)._min_gpus_required, 3)
        self.assertFalse(hasattr(cd.nccl_skip_if_lt_x_gpu("gloo", 3)(lambda self: None), "_min_gpus_required"))
        outer = cd.skip_if_lt_x_gpu(2)(cd.skip_if_lt_x_gpu(4)(lambda self: None))
        self.assertEqual(outer._min_gpus_required, 2)  # the outermost, as in PyTorch; needs_of has both
        self.assertEqual(skip_unless_torch_gpu(lambda self: None)._min_gpus_required, 2)
        self.assertFalse(hasattr(cd.skip_if_small_worldsize(lambda self: None), "_min_gpus_required"))

    def test_function_and_name_are_kept(self):
        def function(self, value):
            "What it does."
            return value

        for decorator in (cd.skip_if_lt_x_gpu(0), cd.skip_if_odd_worldsize, cd.with_nccl_blocking_wait):
            wrapped = decorator(function)
            self.assertEqual((wrapped.__name__, wrapped.__doc__), ("function", "What it does."))
        self.assertEqual(cd.skip_if_lt_x_gpu(0)(function)(None, value=3), 3)

    def test_a_skip_is_decided_again_each_time(self):
        decorator = cd.skip_if_lt_x_gpu(2)
        self.assertEqual([called_under(decorator, count) for count in (2, 1, 2)], ["run", 77, "run"])


class InRanks(Ranks):
    @cd.skip_if_lt_x_gpu(1, allow_cpu=True)
    def runs_on_cpu(self):
        self.tell("run")

    @cd.with_dist_debug_levels(levels=["DETAIL", "INFO", "OFF"])
    def _at_each_level(self, levels):
        levels.append([os.environ["TORCH_DISTRIBUTED_DEBUG"], dist.get_debug_level().name])
        return len(levels)

    def debug_levels(self):
        before = dist.get_debug_level().name
        self.join_group()
        levels = []
        result = self._at_each_level(levels)
        after = [os.environ.get("TORCH_DISTRIBUTED_DEBUG"), dist.get_debug_level().name]
        self.tell([levels, result, before, after])


class TestInRanks(TestCase):
    @unittest.skipIf(accelerators.device_count(), "for a machine without accelerators")
    def test_allow_cpu(self):
        self.assertEqual(ranks_told(InRanks("runs_on_cpu")), ["run", "run"])

    def test_debug_levels(self):
        for level in (None, "INFO"):
            environ = {} if level is None else {"TORCH_DISTRIBUTED_DEBUG": level}
            with self.subTest(level=level), mock.patch.dict(os.environ, environ):
                if level is None:
                    os.environ.pop("TORCH_DISTRIBUTED_DEBUG", None)
                for levels, result, before, after in ranks_told(InRanks("debug_levels")):
                    self.assertEqual(levels, [["DETAIL", "DETAIL"], ["INFO", "INFO"], ["OFF", "OFF"]])
                    self.assertEqual(result, 3)
                    self.assertEqual((before, after), (level or "OFF", [level, level or "OFF"]))

    def test_nccl_blocking_wait(self):
        names = ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCH_NCCL_BLOCKING_WAIT")

        @cd.with_nccl_blocking_wait
        def look(fail=False):
            found = [os.environ.get(name) for name in names]
            if fail:
                raise KeyError(*found)
            return found

        for before in ((None, None), ("1", "0")):
            values = {name: value for name, value in zip(names, before, strict=True) if value is not None}
            with mock.patch.dict(os.environ, values):
                if not values:
                    for name in names:
                        os.environ.pop(name, None)
                self.assertEqual(look(), [None, "1"])
                with self.assertRaises(KeyError):
                    look(fail=True)
                self.assertEqual(tuple(os.environ.get(name) for name in names), before)


if __name__ == "__main__":
    run_tests()

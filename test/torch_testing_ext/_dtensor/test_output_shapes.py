"""Ranks know the shapes of operators' results in advance, and still see every change of rules and of operators."""

import importlib
import unittest
import warnings
from contextlib import contextmanager, nullcontext
from unittest import mock

import torch
import torch.distributed.tensor._ops.utils as rule_utils
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor._op_schema import OpSpec, OpStrategy
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.experimental import register_sharding
from torch.utils._python_dispatch import TorchDispatchMode

from torch_testing_ext import _torch, launch
from torch_testing_ext._torch import output_shapes
from torch_testing_ext.common_utils import TestCase, run_tests
from torch_testing_ext.distributed._tensor.common_dtensor import DTensorTestBase, with_comms
from torch_testing_ext.launch.protocol import Preload

aten = torch.ops.aten


def propagator():
    return DTensor._op_dispatcher.sharding_propagator


def forget_shardings():
    """Have DTensor work everything out again, as in a new process."""
    propagator().propagate_op_sharding.cache_clear()
    cached = getattr(propagator(), "_propagate_tensor_meta_cached", None) or propagator()._propagate_tensor_meta
    cached.cache_clear()
    torch._C._clear_DTensor_sharding_propagator_cache()
    torch._subclasses.fake_tensor.FakeTensorMode.cache_clear()


def fake_operators():
    """How many operators have run on fake tensors so far, counting those found in the cache."""
    mode = torch._subclasses.fake_tensor.FakeTensorMode
    return mode.cache_hits + mode.cache_misses + sum(mode.cache_bypasses.values())


class Ranks(DTensorTestBase):
    world_size = 2

    def operands(self):
        mesh = self.build_device_mesh()
        return distribute_tensor(torch.ones(4, 6), mesh, [Shard(0)]), distribute_tensor(
            torch.ones(6, 8), mesh, [Replicate()]
        )

    def learn(self, run):
        """Work out by `run` what comes of its operators, and learn it here, as a fork server would."""
        output_shapes._known.clear()  # what the fork server has learnt from other tests
        output_shapes._notes = True
        forget_shardings()
        run()
        calls = _torch.unknown_results()
        self.assertTrue(calls)
        for call in calls:
            _torch.preload(call)
        self.assertEqual({*output_shapes._known}, {*calls})
        forget_shardings()

    def assert_known(self, run):
        forget_shardings()
        before = fake_operators()
        result = run()
        self.assertEqual(fake_operators(), before, "a shape was worked out")
        return result

    def assert_worked_out(self, run):
        forget_shardings()
        before = fake_operators()
        result = run()
        self.assertGreater(fake_operators(), before, "no shape was worked out")
        return result


class RulesTest(Ranks):
    """What is known in advance hides no change of a rule: each rank runs the rules."""

    def check(self, change, run=lambda a, b: a @ b):
        """`change` makes DTensor replicate the result, which is sharded otherwise, although its shape is known."""
        operands = self.operands()
        self.learn(lambda: run(*operands))
        self.assertEqual(self.assert_known(lambda: run(*operands)).placements, (Shard(0),))
        with change():
            self.assertEqual(self.assert_known(lambda: run(*operands)).placements, (Replicate(),))

    @with_comms
    def test_another_rule(self):
        def change():
            propagator().op_single_dim_strategy_funcs.pop(softmax, None)  # where torch 2.15 has it; asked first
            return mock.patch.dict(propagator().op_strategy_funcs, {softmax: replicating})

        self.check(change, lambda a, _: a.softmax(1))

    @with_comms
    def test_a_registered_sharding(self):
        def change():
            propagator().op_single_dim_strategy_funcs.pop(softmax, None)

            @register_sharding(softmax)
            def replicate(*_):
                return [([Replicate()], [Replicate(), None, None])]

            return nullcontext()

        self.check(change, lambda a, _: a.softmax(1))

    @with_comms
    def test_a_helper_that_the_rule_calls(self):
        self.check(lambda: mock.patch.object(rule_utils, "generate_redistribute_costs", wrong_costs))

    @with_comms
    def test_the_code_of_a_helper(self):
        @contextmanager
        def change():
            helper = rule_utils.generate_redistribute_costs
            right, helper.__code__ = helper.__code__, wrong_costs.__code__
            try:
                yield
            finally:
                helper.__code__ = right

        self.check(change)


softmax = aten._softmax.default


def replicating(op_schema):
    """A rule that replicates."""
    spec = DTensorSpec(op_schema.args_schema[0].mesh, (Replicate(),))
    return OpStrategy([OpSpec(output_specs=spec, input_specs=[spec], redistribute_cost=[[0.0]])])


def wrong_costs(src_strategy, dst_spec):
    """Only replicated tensors cost nothing."""
    cost = 0.0 if all(placement.is_replicate() for placement in dst_spec.placements) else 1000.0
    return [cost] * len(src_strategy.strategies)


class OperatorsTest(Ranks):
    """What is known in advance counts only while operators, settings and modes are as they were."""

    def check(self, change):
        a, b = self.operands()
        product = lambda: a @ b  # noqa: E731
        self.learn(product)
        self.assert_known(product)
        with change():
            return self.assert_worked_out(product)

    @with_comms
    def test_a_registered_kernel(self):
        library = torch.library.Library("aten", "IMPL")  # as if at import: before anything is learnt
        a, b = self.operands()
        product = lambda: a @ b  # noqa: E731
        self.learn(product)
        self.assert_known(product)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it overrides torch's own
            library.impl("mm", lambda a, b: a.new_empty(4, 80), "Meta", allow_override=True)
        self.assertEqual(self.assert_worked_out(product).shape, (4, 80))

    @with_comms
    def test_a_kernel_in_python(self):
        def change():
            aten.mm.default.py_impl(torch._C.DispatchKey.AutocastCPU)(lambda a, b: a.new_empty(4, 80))
            return nullcontext()

        self.check(change)

    @with_comms
    def test_patched_code(self):
        fake = torch._subclasses.fake_tensor.FakeTensorMode
        schema = importlib.import_module("torch.distributed.tensor._op_schema")
        impls = importlib.import_module("torch._subclasses.fake_impls")
        for thing, name in (
            (fake, "dispatch"),
            (schema.OpSchema, "gen_fake_args"),
            (schema, "_rebuild_tensor_from_dtensor_meta"),
            (torch, "empty_strided"),
            (importlib.import_module("torch._meta_registrations"), "meta_mm"),
        ):
            with self.subTest(name):
                output_shapes._known.clear()
                output_shapes._asked.clear()
                original = getattr(thing, name)
                self.check(lambda thing=thing, name=name, it=original: mock.patch.object(thing, name, wrapper_of(it)))
        with self.subTest("a table"):
            output_shapes._known.clear()
            output_shapes._asked.clear()
            table = impls.op_implementations_dict
            self.check(lambda: mock.patch.dict(table, {"a name": print}))

    @with_comms
    def test_the_method_itself(self):
        method = "_propagate_tensor_meta_non_cached"
        a, b = self.operands()
        self.learn(lambda: a @ b)
        wrong = mock.Mock(side_effect=RuntimeError("the patched one"))
        with mock.patch.object(type(propagator()), method, wrong), self.assertRaisesRegex(RuntimeError, "patched one"):
            a @ b

    @with_comms
    def test_a_setting(self):
        def change():
            torch.set_default_dtype(torch.float64)
            self.addCleanup(torch.set_default_dtype, torch.float32)
            return nullcontext()

        self.check(change)

    @with_comms
    def test_a_mode_sees_the_fake_tensors(self):
        seen = []

        class Watches(TorchDispatchMode):
            def __torch_dispatch__(self, func, types, args=(), kwargs=None):
                if DTensor in types:
                    return NotImplemented
                seen.append(func)
                return func(*args, **(kwargs or {}))

        def product(mode=CommDebugMode):
            with mode():
                return a @ b

        a, b = self.operands()
        self.learn(product)
        self.assert_known(product)
        self.assert_worked_out(lambda: product(Watches))
        self.assertEqual(seen.count(aten.mm.default), 2)  # of fake tensors and of the local ones

    @with_comms
    def test_comm_debug_mode_sees_the_same(self):
        a, b = self.operands()

        def seen():
            with CommDebugMode() as mode:
                torch.softmax(a @ b, dim=0).sum()
            return mode.get_comm_counts(), repr(mode.comm_module_operation_counts)

        expected = seen()
        self.learn(seen)
        self.assertEqual(self.assert_known(seen), expected)

    @with_comms
    def test_the_same_results(self):
        """Of views, operators in place, several results, lists of results, and numbers of several types."""
        mesh = self.build_device_mesh()
        full = torch.arange(48.0).reshape(6, 8)

        def run():
            a = distribute_tensor(full, mesh, [Shard(1)])
            results = [
                a + 1,
                a + 1.5,
                a + True,
                a.t(),
                a.view(6, 2, 4),
                a.sum(0),
                a.to(torch.float64),
                a.clone().add_(a),
            ]
            results += [*a.split(2), *a.max(dim=0), *a.chunk(3), torch.cat([a, a]), torch.stack([a, a]), a.argmax()]
            results += [torch.empty_like(a).fill_(2), a.new_zeros(3, 4), a > 3, torch.where(a > 3, a, 0.0)]
            return [(one.shape, one.stride(), one.dtype, one.placements, one.full_tensor()) for one in results]

        expected = run()
        self.learn(run)
        self.assertEqual(self.assert_known(run), expected)

    @with_comms
    def test_no_trace_of_learning(self):
        a, b = self.operands()
        output_shapes._known.clear()
        output_shapes._notes = True
        forget_shardings()
        a @ b
        mode = torch._subclasses.fake_tensor.FakeTensorMode
        mode.cache_clear()
        for call in _torch.unknown_results():
            _torch.preload(call)
        self.assertTrue(output_shapes._known)
        self.assertEqual((mode.cache, mode.cache_hits, mode.cache_misses, mode.cache_bypasses), ({}, 0, 0, {}))

    @with_comms
    def test_what_is_not_learnt(self):
        a, b = self.operands()
        a @ b  # imports what it needs
        call = next(call for call in self.asked(lambda: a @ b) if "aten.mm" in call)
        with self.subTest("an operator that fails"):
            broken = call.replace("(6, 8)", "(7, 8)")
            self.assertNotEqual(broken, call)
            self.assertRaises(RuntimeError, _torch.preload, broken)
        with (
            self.subTest("an operator that warns"),
            mock.patch.object(output_shapes, "_work_out", lambda schema: warnings.warn("once", stacklevel=1)),
        ):
            _torch.preload(call)
        self.assertEqual(output_shapes._known, {})
        _torch.preload(call)
        self.assertEqual([*output_shapes._known], [call])

    def asked(self, run):
        output_shapes._known.clear()
        output_shapes._notes = True
        forget_shardings()
        run()
        return _torch.unknown_results()


def wrapper_of(original):
    """Another object that does the same, for a function or a method."""

    def wrapper(*args, **kwargs):
        return original(*args, **kwargs)

    return wrapper


class Multiplies(DTensorTestBase):
    """A subject: its methods have names without `test`, so that no loader collects them."""

    world_size = 2

    @with_comms
    def works_it_out(self):
        self.assertEqual(output_shapes._known, {})
        self.multiply()

    @with_comms
    def knows_it(self):
        self.assertTrue(output_shapes._known)
        before = fake_operators()
        self.multiply()
        self.assertEqual(fake_operators(), before)

    def multiply(self):
        mesh = self.build_device_mesh()
        one = distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)])
        self.assertEqual((one @ one.redistribute(mesh, [Replicate()])).full_tensor(), torch.full((4, 4), 4.0))


class HandedOverTest(TestCase):
    """What rank 0 had to work out, the fork server learns."""

    def test_later_ranks_know_it(self):
        launch.close()
        self.addCleanup(launch.close)
        self.run_subject("works_it_out")
        calls = [hint for hint in launch.preload_hints() if "aten.mm" in hint and "(4, 4), (4, 1)" in hint]
        self.assertEqual(len(calls), 1, launch.preload_hints())
        # What it learns while it is idle may come after the next launch.
        launch.client.launcher().server.send(Preload(launch.preload_hints(), at_once=True))
        self.run_subject("knows_it")
        self.assertEqual(output_shapes._known, {}, "the main process has learnt it")

    def run_subject(self, name):
        result = unittest.TestResult()
        Multiplies(name).run(result)
        self.assertEqual([*result.errors, *result.failures], [])


if __name__ == "__main__":
    run_tests()

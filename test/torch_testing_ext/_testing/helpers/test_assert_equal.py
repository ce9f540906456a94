"""assertEqual: agrees with PyTorch's own test case about equality, and describes differences."""

import dataclasses
import functools
import json
import types
import unittest
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from kit.processes import output_of_python
from kit.ranks import OneRank
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from torch_testing_ext._testing.bases.sharded_tensor_base import ShardedTensorTestBase
from torch_testing_ext._testing.helpers import equal_tensors
from torch_testing_ext.common_distributed import MultiThreadedTestCase
from torch_testing_ext.common_utils import TestCase, instantiate_parametrized_tests, parametrize, run_tests

CASES = Path(__file__).with_name("equality_cases.py")


def compare_with_pytorch(*which):
    return json.loads(output_of_python(CASES, *which))


# For these, PyTorch raises an error (it sorts keys that have no order, and lists values without items), or
# reads a dictionary as a list of its keys. We treat them as different.
STRICTER = frozenset({"array str", "array object", "dict mixed keys"})
# For full DTensors inside containers, torch 2.13 fails while it formats its own failure message.
STRICTER_DTENSORS = frozenset({("shard in a list", "far in a list"), ("far in a list", "shard in a list")})
# Before it looked at placements, PyTorch compared DTensors as if they were plain tensors, or failed.
PLACED = {"shard", "shard far", "replicate", "partial"}
KNOWS_PLACEMENTS = hasattr(torch.testing._comparison, "_unwrap_dtensor_for_comparison")


@pytest.mark.slow
class TestAgainstPyTorch(TestCase):
    def test_same_outcome_for_values_of_every_kind(self):
        """By equivalence classes, which `equality_cases.py` describes."""
        answer = compare_with_pytorch("chosen")
        self.assertGreater(answer["count"], 5_000)
        self.assertEqual(self.unexplained(answer["disagreements"]), [])

    @pytest.mark.nightly
    def test_same_outcome_for_every_pair_of_values(self):
        answer = compare_with_pytorch()
        self.assertGreater(answer["count"], 25_000)
        self.assertEqual(self.unexplained(answer["disagreements"]), [])

    def unexplained(self, disagreements):
        return [
            f"{options}: {first!r} and {second!r}: ours {ours}, PyTorch's {theirs}"
            for options, found in disagreements.items()
            for first, second, ours, theirs in found
            if not (ours == "different" and self.is_explained(first, second, theirs))
        ]

    def is_explained(self, first, second, theirs):
        if not KNOWS_PLACEMENTS and {first, second} <= PLACED:
            return True
        return {first, second} & STRICTER or ((first, second) in STRICTER_DTENSORS and theirs == "error")


@dataclasses.dataclass
class Step:
    name: str
    weight: torch.Tensor
    note: str = dataclasses.field(default="", compare=False)


@instantiate_parametrized_tests
class TestMessages(TestCase):
    def message(self, x, y, *args, **kwargs):
        with self.assertRaises(AssertionError) as caught:
            self.assertEqual(x, y, *args, **kwargs)
        return str(caught.exception)

    def test_names_the_path_of_the_item(self):
        x = {"layer": [torch.ones(2), {"bias": torch.zeros(3)}]}
        y = {"layer": [torch.ones(2), {"bias": torch.tensor([0.0, 0.0, 0.5])}]}
        message = self.message(x, y)
        self.assertIn("Tensor-likes are not close!", message)
        self.assertIn("Mismatched elements: 1 / 3", message)
        self.assertIn("Greatest absolute difference: 0.5 at index (2,)", message)
        self.assertIn("for item ['layer'][1]['bias']", message)

    def test_lists_the_other_items_that_differ(self):
        message = self.message([1, 2, 3, 4], [1, 0, 3, 0])
        self.assertIn("Expected 0 but got 2.", message)
        self.assertIn("for item [1]", message)
        self.assertIn("2 of 4 items differ; the others are [3]", message)
        self.assertNotIn("...", message)

    def test_cuts_a_long_list_of_other_items(self):
        message = self.message(list(range(100)), [-1] * 100)
        self.assertIn("100 of 100 items differ", message)
        self.assertIn("[10], ...", message)
        self.assertNotIn("[11]", message)

    @parametrize(
        "x,y,phrase",
        [
            (1, 2, "Scalars are not equal!"),
            (1.0, 2.0, "Scalars are not close!"),
            (True, False, "Booleans mismatch: True is not False"),
            (None, 0, "None mismatch: None is not 0"),
            ([1], [1, 2], "The length of the sequences mismatch: 1 != 2"),
            ({"a": 1}, {"b": 1}, "Missing keys in the actual mapping: ['b']"),
            ("a\nb\n", "a\nc\n", "- b\n+ c"),
            ({1, 2}, {1, 3}, "Items in the first set but not the second:\n2"),
            (int, float, "Type comparison failed: <class 'int'> != <class 'float'>"),
            (torch.float, torch.double, "Object comparison failed: torch.float32 != torch.float64"),
            (torch.ones(2), torch.ones(3), "'shape' do not match: torch.Size([2]) != torch.Size([3])"),
            (torch.ones(2), torch.ones(2).double(), "'dtype' do not match: torch.float32 != torch.float64"),
        ],
        name_fn=lambda x, y, phrase: type(x).__name__ + "_" + "".join(filter(str.isalpha, phrase))[:12],
    )
    def test_message(self, x, y, phrase):
        self.assertIn(phrase, self.message(x, y))

    def test_a_longer_sequence_shows_its_extra_items(self):
        self.assertIn("The first goes on with ['b', 'c']", self.message(["a", "b", "c"], ["a"]))
        self.assertIn("The second goes on with ['b']", self.message([["a"]], [["a", "b"]]))

    def test_structure_comes_before_values(self):
        self.assertIn("length of the sequences", self.message([1, [2]], [0, [2, 3]]))

    def test_a_given_message_is_added(self):
        self.assertTrue(self.message(1, 2, "after step 3").endswith("\nafter step 3"))
        self.assertTrue(self.message([1], [1, 2], "after step 3").endswith("\nafter step 3"))

    def test_a_given_message_replaces_the_text_without_long_messages(self):
        self.longMessage = False
        self.assertEqual(self.message(1, 2, "after step 3"), "after step 3")

    def test_a_function_makes_the_message(self):
        self.assertEqual(self.message(1, 2, lambda text: text.split("!")[0].upper()), "SCALARS ARE NOT EQUAL")

    def test_an_error_in_a_container_names_the_item(self):
        with self.assertRaisesRegex(ValueError, r"(?s)single element.*item \['a'\]\[0\]"):
            self.assertEqual({"a": [torch.ones(3)]}, {"a": [1.0]})

    def test_an_object_whose_comparison_raises(self):
        class Broken:
            def __eq__(self, other):
                raise KeyError("lost")

            __hash__ = None

        with self.assertRaisesRegex(RuntimeError, "Broken == Broken raised KeyError: 'lost'"):
            self.assertEqual(Broken(), Broken())

    def test_not_equal_names_the_equal_values(self):
        with self.assertRaisesRegex(AssertionError, "the two are equal but should differ: 3 and 3"):
            self.assertNotEqual(3, 3)

    def test_traceback_ends_in_the_test(self):
        class Inner(TestCase):
            def test_it(self):
                self.assertEqual(1, 2)

        result = unittest.TestResult()
        Inner("test_it").run(result)
        [(_, traceback)] = result.failures
        self.assertIn("self.assertEqual(1, 2)", traceback)
        self.assertNotIn("_testing/bases/test_case.py", traceback)


class TestStrictness(TestCase):
    def test_exact_tolerances_see_the_last_bit(self):
        x = torch.ones(2)
        y = torch.nextafter(x, torch.full_like(x, 2.0))
        self.assertEqual(x, y)
        self.assertNotEqual(x, y, rtol=0, atol=0)

    def test_half_a_tolerance_is_refused(self):
        for x in (1.0, torch.ones(1), [1.0]):
            with self.assertRaisesRegex(ValueError, "Both 'rtol' and 'atol'"):
                self.assertEqual(x, x, rtol=0.1)

    def test_several_elements_and_one_number_cannot_be_compared(self):
        for number in (1.0, True, np.float32(1)):
            with self.assertRaisesRegex(ValueError, "Got 3 elements"):
                self.assertEqual(torch.ones(3), number)

    def test_coalesced_is_compared_on_request(self):
        one = torch.sparse_coo_tensor([[0, 1]], [1.0, 2.0], (2,), is_coalesced=True)
        other = torch.sparse_coo_tensor([[0, 1]], [1.0, 2.0], (2,), is_coalesced=False)
        self.assertEqual(one, other)
        with self.assertRaisesRegex(AssertionError, "is_coalesced"):
            self.assertEqual(one, other, exact_is_coalesced=True)

    def test_dataclasses_of_tensors_are_compared_by_field(self):
        self.assertEqual(Step("a", torch.ones(2), "x"), Step("a", torch.ones(2), "y"))
        with self.assertRaisesRegex(AssertionError, r"(?s)not close.*item \['weight'\]"):
            self.assertEqual(Step("a", torch.ones(2)), Step("a", torch.zeros(2)))

    def test_unrelated_subclasses_are_compared(self):
        self.assertEqual(torch.nn.Parameter(torch.ones(2)), torch.nn.Buffer(torch.ones(2)))

    def test_arrays_of_strings_inside_containers(self):
        self.assertEqual([np.array(["a", "b"])], [np.array(["a", "b"])])
        self.assertNotEqual([np.array(["a", "b"])], [np.array(["a", "c"])])

    def test_precision_is_the_minimum_tolerance(self):
        self.precision = 0.1
        self.assertEqual(torch.ones(2), torch.ones(2) + 0.05)
        self.assertEqual(1.0, 1.05, rtol=0, atol=0)
        self.assertNotEqual(1.0, 1.2)

    def test_rel_tol_is_the_minimum_tolerance(self):
        self.rel_tol = 0.1
        self.assertEqual(torch.full((2,), 100.0), torch.full((2,), 105.0))
        self.assertNotEqual(100.0, 120.0)

    def test_not_equal_uses_the_overridden_assert_equal(self):
        class ByName(TestCase):
            def assertEqual(self, x, y, msg=None, **kwargs):
                super().assertEqual(type(x), type(y))

        ByName().assertNotEqual(1, "1")
        with self.assertRaises(AssertionError):
            ByName().assertNotEqual(1, 2)

    def test_not_equal_lets_errors_through(self):
        with self.assertRaises(ValueError):
            self.assertNotEqual(torch.ones(3), 1)


class TestDTensors(OneRank):
    """In a rank: meshes keep their groups alive, and with them gloo's threads, which prevent later forks."""

    @functools.cached_property
    def mesh(self):
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        return dist.device_mesh.init_device_mesh("cpu", (1,))

    def dtensor(self, placement, fill=1.0):
        return DTensor.from_local(torch.full((4,), fill), self.mesh, [placement])

    def test_a_dtensor_and_a_plain_tensor_cannot_be_compared(self):
        x, y = self.dtensor(Shard(0)), torch.ones(4)
        for first, second in ((x, y), (y, x), ([x], [y]), ({"a": y}, {"a": x})):
            with self.assertRaisesRegex(TypeError, "ambiguous: compare .full_tensor"):
                self.assertEqual(first, second)

    def test_different_placements_are_named(self):
        with self.assertRaisesRegex(AssertionError, r"placements do not match: \(Shard\(dim=0\),\) != \(Replicate"):
            self.assertEqual(self.dtensor(Shard(0)), self.dtensor(Replicate()))

    def test_full_tensors_are_compared_inside_containers(self):
        self.assertEqual([self.dtensor(Shard(0))], [self.dtensor(Replicate())])
        self.assertNotEqual([self.dtensor(Shard(0))], [self.dtensor(Shard(0), fill=2.0)])

    def test_ranks_communicate_only_if_necessary(self):
        shard, replicate, partial = (self.dtensor(placement) for placement in (Shard(0), Replicate(), Partial()))
        self.assertTrue(equal_tensors._can_compare_shards(shard, shard))
        self.assertTrue(equal_tensors._can_compare_shards(replicate, replicate))
        self.assertFalse(equal_tensors._can_compare_shards(shard, replicate))
        self.assertFalse(equal_tensors._can_compare_shards(partial, partial))


class TestOtherAssertions(TestCase):
    def test_ignore_type(self):
        self.assertEqualIgnoreType(torch.ones(2), torch.ones(2).double())
        with self.assertRaises(AssertionError):
            self.assertEqualIgnoreType(torch.ones(2), torch.zeros(2).double())

    def test_broadcasting(self):
        self.assertEqualBroadcasting(torch.ones(2, 3), 1)
        self.assertEqualBroadcasting(torch.ones(2, 3), [1.0, 1.0, 1.0])
        with self.assertRaises(AssertionError):
            self.assertEqualBroadcasting(torch.ones(2, 3), [1.0, 1.0, 2.0])

    def test_on_one_rank(self):
        self.rank = 1
        for check, others in (("assertEqualOnRank", (1, 2)), ("assertNotEqualOnRank", (1, 1))):
            check = functools.partial(getattr(MultiThreadedTestCase, check), self)
            check(*others, rank=0)
            with self.assertRaises(AssertionError):
                check(*others, rank=1)

    def test_sharded_tensors(self):
        def made(**different):
            parts = {"local_shards": [], "metadata": 1, "sharding_spec": 2, "remote_shards": {}} | different
            return types.SimpleNamespace(**{name: lambda part=part: part for name, part in parts.items()})

        shards = [
            [types.SimpleNamespace(tensor=tensor, metadata=metadata)] for tensor, metadata in ((1, 2), (1, 3), (2, 2))
        ]
        check = functools.partial(ShardedTensorTestBase.assert_sharded_tensor_equal, self)
        check(made(local_shards=shards[0]), made(local_shards=shards[0]))
        for different in (
            *({"local_shards": other} for other in shards[1:]),
            {"local_shards": []},
            {"metadata": 3, "local_shards": shards[0]},
            {"sharding_spec": 3, "local_shards": shards[0]},
            {"remote_shards": {1: []}, "local_shards": shards[0]},
        ):
            with self.subTest(different=different), self.assertRaises(AssertionError):
                check(made(local_shards=shards[0]), made(**different))

    def test_object_in_compares_identity(self):
        tensor = torch.ones(1)
        self.assertObjectIn(tensor, [torch.zeros(1), tensor])
        with self.assertRaises(AssertionError):
            self.assertObjectIn(tensor, [torch.ones(1)])

    def test_greater_almost_equal(self):
        self.assertGreaterAlmostEqual(1.0, 1.0 + 1e-9)
        self.assertGreaterAlmostEqual(1.0, 1.4, delta=0.5)
        self.assertGreaterAlmostEqual(1.0, 1.04, places=1)
        for options in ({}, {"delta": 0.1}, {"places": 1}):
            with self.assertRaisesRegex(AssertionError, "1.0 not greater than or equal to 1.4 within"):
                self.assertGreaterAlmostEqual(1.0, 1.4, **options)

    def test_raises_regex_takes_a_tuple_of_exceptions(self):
        with self.assertRaisesRegex((KeyError, ValueError), "abc"):
            raise ValueError("abc")


if __name__ == "__main__":
    run_tests()

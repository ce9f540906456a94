"""Shard orders, compared with PyTorch's and in round trips; sharding rules, correct and wrong."""

from __future__ import annotations

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.testing._internal.distributed._tensor import common_dtensor as pytorch

from torch_testing_ext.common_utils import run_tests
from torch_testing_ext.distributed._tensor.common_dtensor import (
    DTensorTestBase,
    generate_shard_orders,
    make_full_tensor,
    op_strategy_context,
    patched_distribute_tensor,
    redistribute,
    shard_order_to_placement,
    validate_sharding_rule_sample,
    validate_sharding_rule_sample_backward,
    with_comms,
)

aten = torch.ops.aten


class ShardOrderTest(DTensorTestBase):
    @property
    def world_size(self) -> int:
        return 4

    @with_comms
    def test_orders_equal_pytorchs(self) -> None:
        for shape in ((4,), (2, 2), (2, 2, 1)):
            mesh = init_device_mesh(self.device_type, shape)
            for rank in (1, 2, 3):
                orders = list(generate_shard_orders(mesh, rank))
                self.assertEqual(orders, list(pytorch.generate_shard_orders(mesh, rank)))
                for order in orders:
                    self.assertEqual(
                        shard_order_to_placement(order, mesh), pytorch.shard_order_to_placement(order, mesh)
                    )
        self.assertEqual(shard_order_to_placement(None, mesh), (Replicate(),) * 3)

    @with_comms
    def test_round_trips(self) -> None:
        mesh = init_device_mesh(self.device_type, (2, 2))
        x = torch.arange(64.0, device=self.device_type).reshape(8, 8)
        orders = list(generate_shard_orders(mesh, 2))
        for order in orders:
            placed = patched_distribute_tensor(x, mesh, None, order)
            theirs = pytorch.patched_distribute_tensor(x, mesh, None, order)
            self.assertEqual(placed.to_local(), theirs.to_local(), msg=str(order))
            self.assertEqual(make_full_tensor(placed), x, msg=str(order))
            for other in orders:
                self.assertEqual(make_full_tensor(redistribute(placed, mesh, None, other)), x, msg=f"{order}, {other}")

    # -- sharding rules

    @with_comms
    def test_correct_rules(self) -> None:
        mesh = self.build_device_mesh()
        x, y = (torch.rand(8, 8, device=self.device_type) for _ in range(2))
        for inputs, output in (([Shard(0), Replicate()], Shard(0)), ([Shard(1), Shard(0)], Partial())):
            self.assertTrue(validate_sharding_rule_sample(torch.mm, (x, y), {}, inputs, [output], mesh))
            self.assertIs(validate_sharding_rule_sample_backward(torch.mm, (x, y), {}, inputs, mesh), True)

    @with_comms
    def test_wrong_rules(self) -> None:
        mesh = self.build_device_mesh()
        x = torch.arange(16.0, device=self.device_type).reshape(4, 4)
        self.assertFalse(validate_sharding_rule_sample(torch.cumsum, (x, 0), {}, [Shard(0)], [Shard(0)], mesh))
        self.assertFalse(validate_sharding_rule_sample(torch.sum, (x,), {}, [Shard(0)], [Replicate()], mesh))

        class Doubles(torch.autograd.Function):
            """Its backward is wrong for DTensors only."""

            @staticmethod
            def forward(ctx: torch.autograd.function.FunctionCtx, x: torch.Tensor) -> torch.Tensor:
                return x + x

            @staticmethod
            def backward(ctx: torch.autograd.function.FunctionCtx, grad: torch.Tensor) -> torch.Tensor:
                return grad * (3 if hasattr(grad, "placements") else 2)

        self.assertIs(validate_sharding_rule_sample_backward(Doubles.apply, (x,), {}, [Shard(0)], mesh), False)

    @with_comms
    def test_nothing_to_compare(self) -> None:
        mesh = self.build_device_mesh()
        whole = torch.arange(4, device=self.device_type)
        self.assertIsNone(validate_sharding_rule_sample_backward(torch.neg, (whole,), {}, [Shard(0)], mesh))
        with self.assertRaisesRegex(ValueError, "2 placements for 1 tensors"):
            validate_sharding_rule_sample_backward(torch.neg, (whole,), {}, [Shard(0)] * 2, mesh)

    @with_comms
    def test_errors_for_dtensors(self) -> None:
        mesh = self.build_device_mesh()
        whole = torch.ones(4, device=self.device_type)
        plain = whole.clone()  # DTensors are not added to plain tensors

        def is_wrong(x: torch.Tensor) -> torch.Tensor:
            if isinstance(x, DTensor):
                raise KeyError("not what torch says of an operator that it does not support")
            return x + 1

        self.assertIsNone(validate_sharding_rule_sample_backward(plain.add, (whole,), {}, [Shard(0)], mesh))
        with self.assertRaises(KeyError):
            validate_sharding_rule_sample_backward(is_wrong, (whole,), {}, [Shard(0)], mesh)

    @with_comms
    def test_strategy_is_replaced_temporarily(self) -> None:
        from torch.distributed.tensor._op_schema import OpSchema, OpSpec, OpStrategy

        mesh = self.build_device_mesh()
        x = distribute_tensor(torch.arange(8.0, device=self.device_type), mesh, [Shard(0)])
        before = x.neg().placements

        def only_replicated(schema: OpSchema) -> OpStrategy:
            from torch.distributed.tensor._dtensor_spec import DTensorSpec

            spec = DTensorSpec(mesh, (Replicate(),))
            return OpStrategy([OpSpec(spec, input_specs=(spec,), redistribute_cost=[[0.0]])])

        with op_strategy_context(aten.neg.default, only_replicated):
            self.assertEqual(x.neg().placements, (Replicate(),))
        self.assertEqual(x.neg().placements, before)


if __name__ == "__main__":
    run_tests()

"""The examples of test_fully_shard_properties.py, by value; choose_examples.py chose them."""

import torch
from fully_shard_models import Layer

from torch_testing_ext.hypothesis_utils import MeshPlan

TRAINING = {
    4: [
        (
            "inputs 1, size 8, mesh of 4 x 1",
            {
                "mesh": MeshPlan((4, 1)),
                "inputs": 1,
                "layers": [
                    Layer(3, last_dim=True),
                    Layer(8),
                    Layer(2, activation="ReLU", wrapped=True),
                    Layer(5, bias=True, activation="Tanh", frozen=True, reshard=True),
                ],
                "accumulated": 1,
                "steps": 2,
            },
        ),
        (
            "inputs 8, mesh of 2 x 2, size 4",
            {
                "mesh": MeshPlan((2, 2)),
                "inputs": 8,
                "layers": [
                    Layer(3, activation="ReLU"),
                    Layer(2, wrapped=True),
                    Layer(4, activation="Tanh"),
                    Layer(1, bias=True, frozen=True, last_dim=True),
                ],
                "accumulated": 2,
                "steps": 1,
            },
        ),
        (
            "3 layers, inputs 2, mesh of 1 x 4",
            {
                "mesh": MeshPlan((1, 4)),
                "inputs": 2,
                "layers": [
                    Layer(1, activation="ReLU"),
                    Layer(2, frozen=True, reshard=True, last_dim=True),
                    Layer(5, bias=True, activation="Tanh", wrapped=True),
                ],
                "accumulated": 1,
                "steps": 1,
            },
        ),
        (
            "2 layers, inputs 4, mesh of 4",
            {
                "mesh": MeshPlan((4,)),
                "inputs": 4,
                "layers": [Layer(2, activation="Tanh", reshard=True, last_dim=True), Layer(4, bias=True)],
                "accumulated": 1,
                "steps": 2,
            },
        ),
        (
            "inputs 3, 1 layers",
            {
                "mesh": MeshPlan((4,)),
                "inputs": 3,
                "layers": [Layer(3, bias=True, activation="Tanh", frozen=True, wrapped=True, last_dim=True)],
                "accumulated": 2,
                "steps": 2,
            },
        ),
        (
            "inputs 5",
            {
                "mesh": MeshPlan((4,)),
                "inputs": 5,
                "layers": [
                    Layer(8, activation="ReLU", last_dim=True),
                    Layer(1, activation="ReLU", wrapped=True, last_dim=True),
                    Layer(5, activation="Tanh", last_dim=True),
                    Layer(8, bias=True, activation="Tanh", frozen=True, reshard=True, last_dim=True),
                ],
                "accumulated": 2,
                "steps": 1,
            },
        ),
        (
            "2 layers with size 5",
            {
                "mesh": MeshPlan((1, 4)),
                "inputs": 3,
                "layers": [
                    Layer(5, activation="ReLU", wrapped=True),
                    Layer(8, bias=True, activation="Tanh", frozen=True, reshard=True, last_dim=True),
                ],
                "accumulated": 2,
                "steps": 1,
            },
        ),
        (
            "inputs 4 with mesh of 4 x 1",
            {
                "mesh": MeshPlan((4, 1)),
                "inputs": 4,
                "layers": [Layer(4, bias=True, activation="ReLU", frozen=True, wrapped=True, reshard=True)],
                "accumulated": 2,
                "steps": 1,
            },
        ),
        (
            "3 layers with inputs 5",
            {
                "mesh": MeshPlan((2, 2)),
                "inputs": 5,
                "layers": [
                    Layer(5, activation="Tanh", reshard=True),
                    Layer(8, activation="Tanh"),
                    Layer(8, bias=True, activation="Tanh"),
                ],
                "accumulated": 1,
                "steps": 2,
            },
        ),
        (
            "1 layers with size 8",
            {
                "mesh": MeshPlan((1, 4)),
                "inputs": 8,
                "layers": [Layer(8, bias=True, activation="ReLU", frozen=True, reshard=True, last_dim=True)],
                "accumulated": 1,
                "steps": 2,
            },
        ),
    ],
    3: [
        (
            "inputs 1, size 3, size 2",
            {
                "mesh": MeshPlan((3, 1)),
                "inputs": 1,
                "layers": [
                    Layer(2, reshard=True),
                    Layer(5, activation="Tanh", frozen=True),
                    Layer(3, bias=True, activation="ReLU"),
                    Layer(4, wrapped=True, last_dim=True),
                ],
                "accumulated": 1,
                "steps": 2,
            },
        ),
        (
            "inputs 3, 3 layers, mesh of 1 x 3",
            {
                "mesh": MeshPlan((1, 3)),
                "inputs": 3,
                "layers": [
                    Layer(1, bias=True, wrapped=True),
                    Layer(2, bias=True),
                    Layer(2, bias=True, activation="ReLU", frozen=True, last_dim=True),
                ],
                "accumulated": 2,
                "steps": 1,
            },
        ),
        (
            "inputs 4, 1 layers, size 8",
            {
                "mesh": MeshPlan((3,)),
                "inputs": 4,
                "layers": [Layer(8, activation="ReLU", frozen=True, wrapped=True, last_dim=True)],
                "accumulated": 2,
                "steps": 2,
            },
        ),
        (
            "2 layers, inputs 2",
            {
                "mesh": MeshPlan((3,)),
                "inputs": 2,
                "layers": [Layer(4, activation="Tanh"), Layer(5, bias=True, reshard=True, last_dim=True)],
                "accumulated": 1,
                "steps": 1,
            },
        ),
        (
            "inputs 5",
            {
                "mesh": MeshPlan((3, 1)),
                "inputs": 5,
                "layers": [
                    Layer(8, frozen=True),
                    Layer(1),
                    Layer(8, reshard=True),
                    Layer(3, bias=True, activation="Tanh", wrapped=True, last_dim=True),
                ],
                "accumulated": 2,
                "steps": 2,
            },
        ),
        (
            "inputs 8",
            {
                "mesh": MeshPlan((3,)),
                "inputs": 8,
                "layers": [
                    Layer(8, activation="Tanh", last_dim=True),
                    Layer(2, activation="ReLU", wrapped=True, last_dim=True),
                    Layer(3, bias=True, frozen=True, reshard=True, last_dim=True),
                ],
                "accumulated": 1,
                "steps": 1,
            },
        ),
    ],
}
MIXED_PRECISION = {
    4: [
        (
            "inputs 5, size 1, size 2",
            {
                "mesh": MeshPlan((4,)),
                "inputs": 5,
                "layers": [
                    Layer(1, last_dim=True),
                    Layer(8, frozen=True),
                    Layer(2, bias=True, activation="ReLU", wrapped=True, reshard=True),
                ],
                "policy": {
                    "param_dtype": None,
                    "reduce_dtype": None,
                    "output_dtype": None,
                    "cast_forward_inputs": True,
                },
                "wide": False,
            },
        ),
        (
            "inputs 1, reduce_dtype bfloat16, size 5",
            {
                "mesh": MeshPlan((4,)),
                "inputs": 1,
                "layers": [
                    Layer(4, activation="Tanh", frozen=True, reshard=True),
                    Layer(2),
                    Layer(5, bias=True, activation="ReLU", last_dim=True),
                ],
                "policy": {
                    "reduce_dtype": torch.bfloat16,
                    "param_dtype": torch.float32,
                    "cast_forward_inputs": False,
                    "output_dtype": torch.bfloat16,
                },
                "wide": True,
            },
        ),
        (
            "inputs 4, 2 layers, reduce_dtype float32",
            {
                "mesh": MeshPlan((4,)),
                "inputs": 4,
                "layers": [
                    Layer(2, bias=True, activation="ReLU", frozen=True, wrapped=True),
                    Layer(5, bias=True, activation="Tanh", reshard=True),
                ],
                "policy": {
                    "reduce_dtype": torch.float32,
                    "output_dtype": torch.float32,
                    "param_dtype": torch.bfloat16,
                    "cast_forward_inputs": False,
                },
                "wide": False,
            },
        ),
        (
            "inputs 8, size 3, 1 layers",
            {
                "mesh": MeshPlan((4,)),
                "inputs": 8,
                "layers": [Layer(3, activation="Tanh", last_dim=True)],
                "policy": {
                    "reduce_dtype": None,
                    "param_dtype": torch.bfloat16,
                    "cast_forward_inputs": True,
                    "output_dtype": torch.float32,
                },
                "wide": True,
            },
        ),
        (
            "inputs 3",
            {
                "mesh": MeshPlan((4,)),
                "inputs": 3,
                "layers": [
                    Layer(8, activation="ReLU"),
                    Layer(3, frozen=True),
                    Layer(1, bias=True, wrapped=True, reshard=True, last_dim=True),
                ],
                "policy": {
                    "output_dtype": None,
                    "cast_forward_inputs": False,
                    "param_dtype": None,
                    "reduce_dtype": torch.float32,
                },
                "wide": True,
            },
        ),
        (
            "inputs 2",
            {
                "mesh": MeshPlan((4,)),
                "inputs": 2,
                "layers": [
                    Layer(5, activation="ReLU"),
                    Layer(1, bias=True, activation="Tanh", wrapped=True, last_dim=True),
                    Layer(4, frozen=True),
                ],
                "policy": {
                    "reduce_dtype": torch.float32,
                    "param_dtype": torch.float32,
                    "cast_forward_inputs": True,
                    "output_dtype": torch.bfloat16,
                },
                "wide": True,
            },
        ),
        (
            "inputs 8 with reduce_dtype bfloat16",
            {
                "mesh": MeshPlan((4,)),
                "inputs": 8,
                "layers": [
                    Layer(8, activation="ReLU", wrapped=True, reshard=True),
                    Layer(3, activation="ReLU", last_dim=True),
                ],
                "policy": {
                    "param_dtype": None,
                    "reduce_dtype": torch.bfloat16,
                    "output_dtype": torch.bfloat16,
                    "cast_forward_inputs": False,
                },
                "wide": False,
            },
        ),
        (
            "inputs 4 with output_dtype None",
            {
                "mesh": MeshPlan((4,)),
                "inputs": 4,
                "layers": [Layer(4, frozen=True, wrapped=True, reshard=True)],
                "policy": {
                    "param_dtype": None,
                    "reduce_dtype": None,
                    "output_dtype": None,
                    "cast_forward_inputs": False,
                },
                "wide": False,
            },
        ),
        (
            "inputs 2 with reduce_dtype bfloat16",
            {
                "mesh": MeshPlan((4,)),
                "inputs": 2,
                "layers": [
                    Layer(8, activation="ReLU", wrapped=True),
                    Layer(3, bias=True, activation="Tanh", wrapped=True),
                    Layer(5, frozen=True, wrapped=True, reshard=True, last_dim=True),
                ],
                "policy": {
                    "reduce_dtype": torch.bfloat16,
                    "cast_forward_inputs": False,
                    "output_dtype": None,
                    "param_dtype": torch.bfloat16,
                },
                "wide": True,
            },
        ),
        (
            "inputs 4 with size 1",
            {
                "mesh": MeshPlan((4,)),
                "inputs": 4,
                "layers": [
                    Layer(1, bias=True, wrapped=True, reshard=True, last_dim=True),
                    Layer(4, bias=True, activation="ReLU", frozen=True, wrapped=True, reshard=True, last_dim=True),
                ],
                "policy": {
                    "param_dtype": torch.float32,
                    "cast_forward_inputs": False,
                    "output_dtype": torch.float32,
                    "reduce_dtype": torch.bfloat16,
                },
                "wide": True,
            },
        ),
    ],
    3: [
        (
            "inputs 5, size 1, size 2",
            {
                "mesh": MeshPlan((3,)),
                "inputs": 5,
                "layers": [
                    Layer(1, last_dim=True),
                    Layer(8, frozen=True),
                    Layer(2, bias=True, activation="ReLU", wrapped=True, reshard=True),
                ],
                "policy": {
                    "param_dtype": None,
                    "reduce_dtype": None,
                    "output_dtype": None,
                    "cast_forward_inputs": True,
                },
                "wide": False,
            },
        ),
        (
            "inputs 1, reduce_dtype bfloat16, size 5",
            {
                "mesh": MeshPlan((3,)),
                "inputs": 1,
                "layers": [
                    Layer(4, activation="Tanh", frozen=True, reshard=True),
                    Layer(2),
                    Layer(5, bias=True, activation="ReLU", last_dim=True),
                ],
                "policy": {
                    "reduce_dtype": torch.bfloat16,
                    "param_dtype": torch.float32,
                    "cast_forward_inputs": False,
                    "output_dtype": torch.bfloat16,
                },
                "wide": True,
            },
        ),
        (
            "inputs 4, 2 layers, reduce_dtype float32",
            {
                "mesh": MeshPlan((3,)),
                "inputs": 4,
                "layers": [
                    Layer(2, bias=True, activation="ReLU", frozen=True, wrapped=True),
                    Layer(5, bias=True, activation="Tanh", reshard=True),
                ],
                "policy": {
                    "reduce_dtype": torch.float32,
                    "output_dtype": torch.float32,
                    "param_dtype": torch.bfloat16,
                    "cast_forward_inputs": False,
                },
                "wide": False,
            },
        ),
        (
            "inputs 8, size 3, 1 layers",
            {
                "mesh": MeshPlan((3,)),
                "inputs": 8,
                "layers": [Layer(3, activation="Tanh", last_dim=True)],
                "policy": {
                    "reduce_dtype": None,
                    "param_dtype": torch.bfloat16,
                    "cast_forward_inputs": True,
                    "output_dtype": torch.float32,
                },
                "wide": True,
            },
        ),
        (
            "inputs 3",
            {
                "mesh": MeshPlan((3,)),
                "inputs": 3,
                "layers": [
                    Layer(8, activation="ReLU"),
                    Layer(3, frozen=True),
                    Layer(1, bias=True, wrapped=True, reshard=True, last_dim=True),
                ],
                "policy": {
                    "output_dtype": None,
                    "cast_forward_inputs": False,
                    "param_dtype": None,
                    "reduce_dtype": torch.float32,
                },
                "wide": True,
            },
        ),
        (
            "inputs 2",
            {
                "mesh": MeshPlan((3,)),
                "inputs": 2,
                "layers": [
                    Layer(5, activation="ReLU"),
                    Layer(1, bias=True, activation="Tanh", wrapped=True, last_dim=True),
                    Layer(4, frozen=True),
                ],
                "policy": {
                    "reduce_dtype": torch.float32,
                    "param_dtype": torch.float32,
                    "cast_forward_inputs": True,
                    "output_dtype": torch.bfloat16,
                },
                "wide": True,
            },
        ),
    ],
}

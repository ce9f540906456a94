"""The examples of test_tp_properties.py, by value; choose_examples.py chose them."""

from torch_testing_ext.distributed._tensor.common_dtensor import ModelArgs
from torch_testing_ext.hypothesis_utils import MeshPlan

MLP = [
    (
        "widths [1, 3, 13], batch 3, bias",
        {
            "mesh": MeshPlan((4,)),
            "widths": [1, 3, 13],
            "batch": 3,
            "bias": True,
            "plan": ["rowwise", "none", "pair", "colwise"],
        },
    ),
    (
        "widths [2, 8, 3], batch 2, not bias",
        {
            "mesh": MeshPlan((4,)),
            "widths": [2, 8, 3],
            "batch": 2,
            "bias": False,
            "plan": ["rowwise", "none", "pair", "colwise"],
        },
    ),
    (
        "widths [5, 1, 1, 1], batch 1",
        {
            "mesh": MeshPlan((4,)),
            "widths": [5, 1, 1, 1],
            "batch": 1,
            "bias": True,
            "plan": ["pair", "colwise", "rowwise", "none"],
        },
    ),
    (
        "widths [8, 13, 1, 13], batch 5",
        {
            "mesh": MeshPlan((4,)),
            "widths": [8, 13, 1, 13],
            "batch": 5,
            "bias": True,
            "plan": ["colwise", "none", "rowwise", "pair"],
        },
    ),
    (
        "widths [1, 1, 1]",
        {
            "mesh": MeshPlan((4,)),
            "widths": [1, 1, 1],
            "batch": 3,
            "bias": False,
            "plan": ["rowwise", "none", "colwise", "pair"],
        },
    ),
    (
        "widths [13, 1, 5, 13]",
        {
            "mesh": MeshPlan((4,)),
            "widths": [13, 1, 5, 13],
            "batch": 1,
            "bias": False,
            "plan": ["rowwise", "none", "colwise", "pair"],
        },
    ),
    (
        "widths [8, 2, 4, 2, 5]",
        {
            "mesh": MeshPlan((4,)),
            "widths": [8, 2, 4, 2, 5],
            "batch": 2,
            "bias": True,
            "plan": ["colwise", "rowwise", "none", "pair"],
        },
    ),
    (
        "widths [5, 4, 5]",
        {
            "mesh": MeshPlan((4,)),
            "widths": [5, 4, 5],
            "batch": 5,
            "bias": False,
            "plan": ["colwise", "none", "pair", "none"],
        },
    ),
    (
        "widths [8, 8, 3]",
        {
            "mesh": MeshPlan((4,)),
            "widths": [8, 8, 3],
            "batch": 2,
            "bias": False,
            "plan": ["pair", "none", "rowwise", "colwise"],
        },
    ),
    (
        "widths [8, 3, 3]",
        {
            "mesh": MeshPlan((4,)),
            "widths": [8, 3, 3],
            "batch": 2,
            "bias": False,
            "plan": ["pair", "none", "rowwise", "colwise"],
        },
    ),
    (
        "widths [2, 5, 8]",
        {
            "mesh": MeshPlan((4,)),
            "widths": [2, 5, 8],
            "batch": 3,
            "bias": False,
            "plan": ["rowwise", "none", "pair", "colwise"],
        },
    ),
    (
        "widths [5, 2, 13]",
        {
            "mesh": MeshPlan((4,)),
            "widths": [5, 2, 13],
            "batch": 2,
            "bias": False,
            "plan": ["colwise", "rowwise", "none", "pair"],
        },
    ),
    (
        "widths [5, 5, 13]",
        {
            "mesh": MeshPlan((4,)),
            "widths": [5, 5, 13],
            "batch": 2,
            "bias": False,
            "plan": ["colwise", "rowwise", "none", "pair"],
        },
    ),
    (
        "widths [5, 13, 13]",
        {
            "mesh": MeshPlan((4,)),
            "widths": [5, 13, 13],
            "batch": 2,
            "bias": False,
            "plan": ["colwise", "rowwise", "none", "pair"],
        },
    ),
]
TRANSFORMER = [
    (
        "2 rows of 4 tokens, tokens (2, 4), mesh of 4",
        {
            "mesh": MeshPlan((4,)),
            "args": ModelArgs(vocab_size=4, max_seq_len=8, dim=8, dropout_p=0.0, checkpoint_activations=True),
            "tokens": (2, 4),
            "sequence_parallel": True,
        },
    ),
    (
        "1 rows of 4 tokens, tokens (1, 4), large dim",
        {
            "mesh": MeshPlan((4, 1)),
            "args": ModelArgs(
                n_layers=1, max_seq_len=8, dim=24, n_heads=8, dropout_p=0.0, use_attn_mask=False, weight_tying=False
            ),
            "tokens": (1, 4),
            "sequence_parallel": False,
        },
    ),
    (
        "2 rows of 5 tokens, tokens (2, 5), mesh of 1 x 4",
        {
            "mesh": MeshPlan((1, 4)),
            "args": ModelArgs(
                n_layers=1,
                vocab_size=7,
                max_seq_len=8,
                dim=4,
                dropout_p=0.0,
                weight_tying=False,
                checkpoint_activations=True,
            ),
            "tokens": (2, 5),
            "sequence_parallel": False,
        },
    ),
    (
        "3 rows of 2 tokens, tokens (3, 2), dim 16",
        {
            "mesh": MeshPlan((2, 2)),
            "args": ModelArgs(vocab_size=11, max_seq_len=8, n_heads=8, dropout_p=0.0, use_attn_mask=False),
            "tokens": (3, 2),
            "sequence_parallel": True,
        },
    ),
    (
        "1 rows of 1 tokens, tokens (1, 1), vocab_size 3",
        {
            "mesh": MeshPlan((4, 1)),
            "args": ModelArgs(vocab_size=3, max_seq_len=8, dim=12, dropout_p=0.0, checkpoint_activations=True),
            "tokens": (1, 1),
            "sequence_parallel": True,
        },
    ),
    (
        "3 rows of 8 tokens, tokens (3, 8)",
        {
            "mesh": MeshPlan((1, 4)),
            "args": ModelArgs(max_seq_len=8, dim=24, n_heads=8, dropout_p=0.0, checkpoint_activations=True),
            "tokens": (3, 8),
            "sequence_parallel": True,
        },
    ),
    (
        "3 rows of 1 tokens, tokens (3, 1)",
        {
            "mesh": MeshPlan((4,)),
            "args": ModelArgs(n_layers=1, vocab_size=7, max_seq_len=8, dim=8, dropout_p=0.0, use_attn_mask=False),
            "tokens": (3, 1),
            "sequence_parallel": False,
        },
    ),
    (
        "3 rows of 4 tokens, tokens (3, 4)",
        {
            "mesh": MeshPlan((2, 2)),
            "args": ModelArgs(
                vocab_size=11,
                max_seq_len=8,
                dim=12,
                dropout_p=0.0,
                use_attn_mask=False,
                weight_tying=False,
                checkpoint_activations=True,
            ),
            "tokens": (3, 4),
            "sequence_parallel": False,
        },
    ),
]

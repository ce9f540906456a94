"""The bugs of docs/found: in which versions of torch they are, and how a test says that one is repaired.

If torch has fixed one, add the version here, and make the exceptions for it in the suites end there.
"""

import ast
import re
import sys
from pathlib import Path

import torch

# For the tables of its suites. This folder is known by links, too, from which `..` would lead elsewhere.
sys.path.append(str(Path(__file__).resolve().parents[2] / "distributed" / "properties"))
from known_versions import ALL as ALL, FIRST_UNKNOWN, repaired as repaired

# The first version of torch that is right; None if no version is.
FIXED_IN = {
    "amax_of_a_rank_without_elements": None,
    "argmax_of_columns": None,
    "causal_attention_of_sharded_heads": None,
    "compiled_random_values_twice": (2, 14),
    "compiled_read_of_a_missing_attribute": None,
    "compiled_write_to_a_float64_scalar": (2, 14),
    "convolution_of_sharded_weights": None,
    "cross_product_of_broadcast_rows": None,
    "cumsum_of_a_sharded_dim": (2, 14),
    "embedding_rank_without_rows": None,
    "endless_search_for_attention": None,
    "fft_of_a_rank_without_rows": (2, 15),
    "fill_of_a_partial_sum": None,
    "flatten_of_a_dim_sharded_twice": None,
    "gloo_second_wait": None,
    "gloo_split_of_a_second_group": (2, 14),
    "item_of_a_partial_sum": None,
    "item_of_a_rank_without_elements": None,
    "local_synchronization_and_group_names": None,
    "mse_loss_of_uneven_shards": None,
    "permute_by_group_name": None,
    "pipeline_eval_of_v_schedules": None,
    "pipeline_gradient_of_a_view": None,
    "pipeline_split_backward_of_frozen_inputs": None,
    "pipeline_split_backward_of_shared_weights": None,
    "zero_join_alone": None,
}
# The first version that is wrong, where an earlier one, which we support, is right.
WRONG_SINCE = {
    "cross_product_of_broadcast_rows": (2, 14),
    "endless_search_for_attention": (2, 12),
    "fft_of_a_rank_without_rows": (2, 12),
    "local_synchronization_and_group_names": (2, 14),
    "pipeline_gradient_of_a_view": (2, 12),
    "pipeline_split_backward_of_frozen_inputs": (2, 12),
}
# Before this version, the file ends with an error of torch.
RAISED_BEFORE = {
    "argmax_of_columns": (2, 12),
    "causal_attention_of_sharded_heads": (2, 12),
    "convolution_of_sharded_weights": (2, 12),
    "fft_of_a_rank_without_rows": (2, 12),
    "pipeline_eval_of_v_schedules": (2, 12),
    "pipeline_split_backward_of_frozen_inputs": (2, 13),
}

FIXED = [
    name
    for name, version in FIXED_IN.items()
    if (version and torch.__version__ >= version) or torch.__version__ < WRONG_SINCE.get(name, (0, 0))
]

FOUND = Path(__file__).resolve().parents[3] / "docs" / "found"


def page(name):
    """The file that shows a bug. Those that the newest torch has mended are in a folder of their own."""
    return FOUND / ("mended" if FIXED_IN[name] else "") / f"{name}.py"


def table(names):
    """The rows of README.md for these pages: what is wrong, in which versions, and what PyTorch's issues say."""
    rows = []
    for name in sorted(names):
        text = ast.get_docstring(ast.parse(page(name).read_text(encoding="utf-8")))
        issues = dict.fromkeys(re.findall(r"pytorch/pytorch#(\d+)", text))
        links = ", ".join(f"[#{number}](https://github.com/pytorch/pytorch/issues/{number})" for number in issues)
        file = page(name).relative_to(FOUND)
        rows.append(f"| [{name}]({file}) | {text.splitlines()[0]} | {_open_in(name)} | {links} |\n")
    return "".join(rows)


def _open_in(name):
    """The versions that are wrong, of those that we have looked at, and those that raise an error of their own."""
    known = [(2, minor) for minor in range(11, FIRST_UNKNOWN[1])]
    wrong = [each for each in known if WRONG_SINCE.get(name, known[0]) <= each < (FIXED_IN[name] or FIRST_UNKNOWN)]
    raising = [each for each in wrong if each < RAISED_BEFORE.get(name, known[0])]
    return _range(wrong[len(raising) :]) + (f" ({_range(raising)} raises)" if raising else "")


def _range(versions):
    first, last = (".".join(map(str, each)) for each in (versions[0], versions[-1]))
    return first if first == last else f"{first} to {last}"


def imports_of(source):
    """The packages that a program imports."""
    nodes = list(ast.walk(ast.parse(source)))
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module for node in nodes if isinstance(node, ast.ImportFrom)]
    return {name.partition(".")[0] for name in names}

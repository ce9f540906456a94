"""Containers of tensors as trees: torch's pytrees.

`torch.utils._pytree`: 2.11 to 2.15. Importing torch imports it.
"""

from torch.utils import _pytree

keystr = _pytree.keystr
tree_flatten = _pytree.tree_flatten
tree_flatten_with_path = _pytree.tree_flatten_with_path
tree_leaves = _pytree.tree_leaves
tree_map = _pytree.tree_map
tree_map_only = _pytree.tree_map_only
tree_unflatten = _pytree.tree_unflatten

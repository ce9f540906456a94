"""Kinds of tensors in torch: how they are compared, wrapped, read and sharded.

Others may take each of the modules.

    tensor_comparison   `torch.testing.assert_close`
    tensor_subclasses   subclasses that wrap other tensors
    tensor_reads        reads that no dispatch mode sees
    tensor_values       values that are not finite
    nested_tensors      tensors in lists, tuples and dicts
    pytrees             torch's trees of containers
    dtensor_parts       DTensors
    replicated_tensors  tensors that all ranks of a group hold alike
"""

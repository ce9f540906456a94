"""The module names of `torch.testing._internal.distributed`."""

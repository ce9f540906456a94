"""PyTorch's `torch.testing._internal.distributed`, by our own hands."""

"""A test kit for code that uses torch.distributed. Importing this package does not import torch."""

__version__ = "0.1.0"

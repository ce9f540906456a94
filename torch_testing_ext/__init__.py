"""A test kit for code on torch.distributed. Importing it imports no torch."""

__version__ = "0.1.0"

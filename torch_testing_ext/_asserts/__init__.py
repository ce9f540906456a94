"""Equality of tensors and containers, and expected texts."""

"""Moves tests to and from a PyTorch checkout: runs its files here, imports them, and makes patches of ours.

All of it reads one table of module names, `mapping`. Nothing here imports torch before a test file does, and only
`drop_in` loads modules of `torch.testing._internal`, for names that we lack.
"""

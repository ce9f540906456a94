"""To and from a PyTorch checkout: run its test files here, import them, and send ours there as a patch.

All of it reads one table of module names, `mapping`. Nothing here imports torch before a test file does, and only
`drop_in` loads modules of `torch.testing._internal`, for names that we lack.
"""

"""The way to and from a PyTorch checkout: run its test files here, bring them here, send ours there.

`mapping` is the one table of names that all of it reads. Nothing here imports torch before a test file does, and only
`drop_in` ever loads a module of `torch.testing._internal`: for the names that we do not have.
"""

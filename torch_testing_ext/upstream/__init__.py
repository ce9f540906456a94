"""Moves tests to and from a PyTorch checkout: runs its files here, imports them, and makes patches of ours.

Could be a product of its own: the rest may import `drop_in` alone, and `moving` is its second command. It imports
`launch`, and names the modules of the mirror as strings. All of it reads one table of module names, `mapping`. Nothing
here imports torch before a test file does, and only `originals` loads modules of `torch.testing._internal`, for names
that we lack.
"""

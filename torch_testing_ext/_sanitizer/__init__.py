"""The additions of `--sanitize` to a rank: a log of all that it issues, and checks of the tensors."""

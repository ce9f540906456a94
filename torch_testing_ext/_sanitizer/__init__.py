"""What `--sanitize` adds to a rank: a log of all that it issues, and checks of the tensors."""

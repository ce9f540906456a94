"""Parts of a rank under `--sanitize`: a log of all that it issues, and checks of the tensors."""

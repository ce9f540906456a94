"""The files and tests that the user selected."""

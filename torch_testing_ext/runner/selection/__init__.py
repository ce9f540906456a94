"""Which files and tests the user selected."""

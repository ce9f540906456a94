"""Which files and tests a user means."""

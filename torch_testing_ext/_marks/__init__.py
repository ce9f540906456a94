"""What a test needs and how it is parametrized, written on its function or class."""

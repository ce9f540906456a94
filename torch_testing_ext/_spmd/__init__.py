"""The data-parallel compiler."""

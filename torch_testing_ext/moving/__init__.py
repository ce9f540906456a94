"""Converts the tests of other projects where that is mechanical: `python -m torch_testing_ext.moving`."""

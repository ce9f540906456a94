"""Bases, models and checks for tests of FSDP, DTensor and checkpoints. Imports the other rooms of `_testing`."""

"""Whole worlds: all ranks of a program without communication, and the rules that compare them."""

from torch_testing_ext._testing.bases.whole_worlds import (
    World as World,
    check_world as check_world,
    whole_world as whole_world,
)

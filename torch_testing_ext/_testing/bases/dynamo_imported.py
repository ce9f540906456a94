"""Importing this imports dynamo, so that processes forked from this one need not do so each."""

import importlib

from torch_testing_ext._torch import compiler_state

importlib.import_module(compiler_state.DYNAMO)

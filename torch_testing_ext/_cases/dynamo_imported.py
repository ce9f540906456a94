"""Importing this imports dynamo, so that processes forked from this one need not do so each."""

import importlib

from torch_testing_ext import _torch

importlib.import_module(_torch.process_state.DYNAMO)

"""The first ranks of a file are started when the parent has changed its state already: they must not see that."""

import decimal
import gc
import locale
import logging
import os
import socket
import sys
import warnings
from unittest import mock

import torch
from notes import note
from torch.testing._internal.common_distributed import MultiProcessTestCase
from torch.testing._internal.common_utils import run_tests

GLOBAL = {"changed": False}
PATCHED = "as written"


class ChangedBySetUpTest(MultiProcessTestCase):
    """Changed in setUp, before `_spawn_processes`."""

    world_size = 1
    of_the_class = "as written"

    def setUp(self):
        super().setUp()
        GLOBAL["changed"] = True
        type(self).of_the_class = "changed"
        patched = mock.patch(f"{__name__}.PATCHED", "patched")
        patched.start()
        self.addCleanup(patched.stop)
        logging.getLogger("conformance").setLevel(logging.ERROR)
        torch.set_default_dtype(torch.float64)
        torch.set_grad_enabled(False)
        torch.use_deterministic_algorithms(True)
        torch.set_printoptions(precision=2)
        socket.setdefaulttimeout(5)
        sys.modules["made_up"] = sys
        decimal.getcontext().prec = 5
        gc.disable()
        self._spawn_processes()

    def tearDown(self):
        torch.set_default_dtype(torch.float32)
        torch.set_grad_enabled(True)
        torch.use_deterministic_algorithms(False)
        torch.set_printoptions(profile="default")
        socket.setdefaulttimeout(None)
        sys.modules.pop("made_up", None)
        decimal.getcontext().prec = 28
        gc.enable()
        super().tearDown()

    def test_everything(self):
        note(self, "global", GLOBAL["changed"])
        note(self, "class", self.of_the_class)
        note(self, "patch", PATCHED)
        note(self, "logging", logging.getLogger("conformance").level)
        note(self, "dtype", torch.get_default_dtype())
        note(self, "grad", torch.is_grad_enabled())
        note(self, "deterministic", torch.are_deterministic_algorithms_enabled())
        note(self, "print options", str(torch.tensor(1.23456)))
        note(self, "socket", socket.getdefaulttimeout())
        note(self, "modules", "made_up" in sys.modules)
        note(self, "decimal", decimal.getcontext().prec)
        note(self, "gc", gc.isenabled())
        note(self, "sparse invariants", torch.sparse.check_sparse_tensor_invariants.is_enabled())

    def test_environment(self):
        note(self, locale.getlocale()[1], os.getcwd() == os.path.realpath(os.getcwd()), len(warnings.filters) > 0)


if __name__ == "__main__":
    run_tests()

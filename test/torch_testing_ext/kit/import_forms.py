"""A file with every form of import of PyTorch's kit, and files that differ from it in their bytes."""

EVERY_FORM = '''\
# -*- coding: utf-8 -*-
# Owner(s): ["oncall: distributed"]
"""torch.testing._internal.common_utils stays in prose: Grüße."""
import os, torch
import torch.testing._internal.common_utils
import torch.testing._internal.common_utils as common  # torch.testing._internal.common_utils
from torch.testing._internal import common_distributed, common_utils as cu
from torch.testing._internal.common_distributed import (
    MultiProcessTestCase,   # a comment

    skip_if_lt_x_gpu as skip,
)
from torch.testing._internal.common_fsdp import *
from torch.testing._internal.common_nn import TEST_CUDA
if os.name == "posix": from torch.testing._internal.distributed.fake_pg import FakeStore; x = 1
try:
\tfrom torch.testing._internal.common_utils import NEWER
except ImportError:
\tNEWER = 'ß'


class T( torch.testing._internal.common_utils.TestCase ):
    @mock.patch('torch.testing._internal.common_utils.run_tests')
    @patch(r"torch.testing._internal.common_distributed.TIMEOUT_DEFAULT", 4)
    def test(self, m):
        from torch.testing._internal.distributed._tensor.common_dtensor import with_comms
        importlib.import_module("torch.testing._internal.common_utils")
        print("torch.testing._internal.common_utils", f"torch.testing._internal.common_utils", common.IS_LINUX)
        return   torch.testing._internal.common_utils.run_tests , cu.SEED
'''
LATIN = EVERY_FORM.replace("utf-8 -*-", "latin-1 -*-").encode("latin-1")
FILES = {
    "lf": EVERY_FORM.encode(),
    "crlf": EVERY_FORM.replace("\n", "\r\n").encode(),
    "mixed": EVERY_FORM.encode().replace(b":\n", b":\r\n"),
    "bom": b"\xef\xbb\xbf" + EVERY_FORM.encode(),
    "latin_1": LATIN,
    "no_newline_at_end": EVERY_FORM.encode().rstrip(),
    "empty": b"",
    "nothing_of_it": b"import torch\n",
}

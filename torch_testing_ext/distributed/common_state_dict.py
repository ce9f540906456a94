"""Checks of distributed state dicts, under the names of torch.testing._internal.distributed.common_state_dict."""

from torch_testing_ext._fsdp.state_dicts import *

import json

from torch.testing._internal import common_utils as theirs

from torch_testing_ext import common_utils as ours
from torch_testing_ext._machine import flags

names = [name for name in flags.names_of_flags() if hasattr(theirs, name)]


def plain(value):
    return value._cb() if type(value).__name__ == "LazyVal" else value


pairs = {name: (getattr(ours, name), plain(getattr(theirs, name))) for name in names}
# PyTorch's flags that are off are False or None.
differ = {name: repr(pair) for name, pair in pairs.items() if pair[0] != pair[1] and any(pair)}
print(json.dumps([len(names), differ]))

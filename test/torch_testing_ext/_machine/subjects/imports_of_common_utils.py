import json
import sys
from unittest import mock

import torch
import torch.distributed

asked = []
names = [
    "cuda.is_available",
    "cuda.device_count",
    "xpu.is_available",
    "accelerator.is_available",
    "accelerator.device_count",
    "accelerator.current_accelerator",
]
patches = [mock.patch(f"torch.{name}", lambda *a, name=name, **k: asked.append(name)) for name in names]
for patch in patches:
    patch.start()
before = set(sys.modules)
import torch_testing_ext.common_utils

new = {name if name.startswith("torch.") else name.split(".")[0] for name in set(sys.modules) - before}
print(json.dumps([asked, sorted(new)]))

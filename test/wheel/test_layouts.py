"""Projects with other layouts than tests beside the code: src, and namespace packages."""

from __future__ import annotations

import pytest
from stranger import Stranger

TEST = """
import pytest
import torch
import torch.distributed as dist
from {module} import summed

@pytest.mark.world_size(2)
def test_summed(dist_env):
    assert summed(torch.ones(1)).item() == 2
"""
CODE = """
import torch.distributed as dist

def summed(tensor):
    dist.all_reduce(tensor)
    return tensor
"""
PYPROJECT = """
[build-system]
requires = ["setuptools>=77"]
build-backend = "setuptools.build_meta"

[project]
name = "{name}"
version = "1"
"""


@pytest.mark.parametrize("runner", ["pytest", "torchtest"])
def test_src(stranger: Stranger, runner: str) -> None:
    """The package is not installed: pytest's setting finds it, in ranks too."""
    stranger.write(
        {
            "pyproject.toml": '[tool.pytest.ini_options]\npythonpath = ["src"]\n',
            "src/inside/__init__.py": "",
            "src/inside/sums.py": CODE,
            "tests/unit/__init__.py": "",
            "tests/unit/test_sums.py": TEST.format(module="inside.sums"),
        }
    )
    assert "1 passed" in stranger.types(runner)


@pytest.mark.parametrize("runner", ["pytest", "torchtest"])
def test_namespace_packages(stranger: Stranger, runner: str) -> None:
    """Two folders bring parts of one package, and tests in two folders have one name."""
    stranger.write(
        {
            "pytest.ini": "[pytest]\npythonpath = one two\naddopts = --import-mode=importlib\n",
            "one/company/sums.py": CODE,
            "two/company/more.py": "from company.sums import summed as summed\n",
            "tests/one/test_it.py": TEST.format(module="company.sums"),
            "tests/two/test_it.py": TEST.format(module="company.more"),
        }
    )
    assert "2 passed" in stranger.types(runner)

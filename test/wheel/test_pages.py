"""README.md and "Get started", followed by a stranger from the top: each command prints what the pages show."""

from __future__ import annotations

import pytest
from kit.walkthrough import Walkthrough
from stranger import ROOT, Stranger

# In the order in which they are read: each goes on where the one before has stopped.
GET_STARTED = [
    ROOT / "docs" / "get-started" / f"{name}.md" for name in ("install", "first-test", "first-failure", "gpus", "ci")
]


@pytest.mark.parametrize(
    ("pages", "least"),
    [pytest.param([ROOT / "README.md"], 1, id="readme"), pytest.param(GET_STARTED, 10, id="get-started")],
)
def test_pages(stranger: Stranger, pages, least: int) -> None:
    reader = Walkthrough(stranger.project, stranger.environ)
    faults = [fault for page in pages for fault in reader.follow(page.read_text(encoding="utf-8"))]
    assert not faults, "\n".join(faults)
    assert reader.commands >= least


def test_the_environment_is_a_strangers(stranger: Stranger) -> None:
    """The wheel, nothing of the checkout, and the default torch: its CUDA build starts other programs on import."""
    facts = stranger.types(
        "python -c 'import torch_testing_ext, torch; print(torch_testing_ext.__file__, torch.version.cuda)'"
    )
    file, cuda = facts.split()
    assert file.startswith(str(stranger.environment)), facts
    assert cuda != "None", "the index has installed a CPU build of torch: nothing here says how the default one behaves"

"""Prepares the zygote for the test files of a run before it forks: the modules that it imports, and its memory."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from torch_testing_ext._cases.source_facts import facts_of

ALWAYS = ("torch", "torch.distributed", "torch_testing_ext.common_distributed")
_FSDP = "torch_testing_ext.common_fsdp"
_DTENSOR = "torch_testing_ext.distributed._tensor.common_dtensor"
_DYNAMO = "torch_testing_ext._cases.dynamo_imported"
_MANY = 8  # tests


@dataclass(frozen=True)
class WarmUp:
    """The preparations of the zygote. The default is for files that are not known."""

    modules: tuple[str, ...] = (*ALWAYS, _FSDP, _DTENSOR)
    # Its memory: this takes up to half a second, and makes each fork 5 to 15 ms faster, of which a test needs several.
    collapse: bool = True


def warm_up_for(root: Path, files: Iterable[str]) -> WarmUp:
    """Choose what saves time for these files, given relative to the root.

    What no file uses is not imported: FSDP and DTensor take half as long as torch itself, and dynamo as long again. The
    process of a file that imports more does so itself. Dynamo is imported if half of the files use it: all other files
    would wait for it, and each process that is forked gets larger by a tenth.
    """
    facts = [facts_of(str(root / name)) for name in files]
    modules = [*ALWAYS]
    if any(one.fsdp for one in facts):
        modules.append(_FSDP)
    if any(one.dtensor for one in facts):
        modules.append(_DTENSOR)
    if facts and 2 * sum(one.dynamo for one in facts) >= len(facts):
        modules.append(_DYNAMO)
    are_many = any(one.generates for one in facts) or sum(one.tests for one in facts) >= _MANY
    return WarmUp(tuple(modules), are_many)

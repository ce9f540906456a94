"""What a test that passes has said about its ranks: to be shown although its output is not."""

from __future__ import annotations

from collections.abc import Iterator

# Begins each such remark, on stderr. The lines that belong to it are indented.
_START = "torch_testing_ext: "
_INDENT = "  "


def remarks_in(output: str) -> list[str]:
    """The remarks in the output of a test's process."""
    return list(_remarks(output))


def subject_of(remark: str) -> str:
    """What a remark is about, without the reason: that may differ between processes, as by the names of threads."""
    return remark.partition(", because")[0]


def _remarks(output: str) -> Iterator[str]:
    remark = ""
    for line in output.splitlines():
        if remark and line.startswith(_INDENT):
            remark += f"\n{line}"
            continue
        if remark:
            yield remark
        remark = line.removeprefix(_START) if line.startswith(_START) else ""
    if remark:
        yield remark

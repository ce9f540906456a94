"""Places that the configuration of CI names, and that do not exist: a job whose filter names one never starts."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from torch_testing_ext._process.logs import text_of

_CONFIGURATIONS = (
    *(".github/workflows/*.yml", ".github/workflows/*.yaml", ".gitlab-ci.yml", ".gitlab/**/*.yml"),
    *(".buildkite/**/*.yml", ".buildkite/**/*.yaml", ".circleci/*.yml", "azure-pipelines.yml", "Jenkinsfile"),
)


def dead_paths(root: Path, places: Sequence[Path]) -> Iterator[str]:
    """Each path below the folders of tests that a configuration names in vain, with its line, in words."""
    tops = sorted({place.relative_to(root).parts[0] for place in places if place.relative_to(root).parts})
    if not tops:
        return
    pattern = re.compile(rf"(?<![\w./-])(?:{'|'.join(map(re.escape, tops))})/[\w./-]*[\w-]")
    for configuration in _CONFIGURATIONS:
        for file in sorted(root.glob(configuration)):
            for number, line in enumerate(text_of(file).splitlines(), 1):
                for path in pattern.findall(line.partition(" #")[0]):
                    if not (root / path).exists():
                        yield f"{file.relative_to(root).as_posix()}:{number} names {path}, which does not exist"

"""Checks the files of a release, and writes what goes with them: hashes, and a bill of materials for each wheel.

    python3 .ci/release_files.py dist [TAG]

`SHA256SUMS` is as `sha256sum --check` reads it. `NAME.cdx.json` is a bill of materials in CycloneDX: the package, with
what it requires. The names of both files, the changelog and the tag (v0.1.0), if there is one, have to agree with the
version of the package, and no file of the wheel may be outside of the package. Exits with 1 and a line for each fault.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
import tarfile
import zipfile
from collections.abc import Iterator, Sequence
from email.message import Message
from email.parser import BytesParser
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
CHANGELOG = ROOT / "CHANGELOG.md"
PACKAGE = "torch_testing_ext"
# The package, the module that pytest finds it by, and what Python knows of the installation.
TOPS = re.compile(rf"{PACKAGE}/|{PACKAGE}_points\.py$|{PACKAGE}-[\w.]+\.dist-info/")
# What only a checkout has, or what a build leaves behind.
UNWANTED = re.compile(r"(^|/)(__pycache__|\.git|\.venv|\.hypothesis|build|dist)/|\.pyc$|\.egg-link$")


def facts_of(wheel: Path) -> Message:
    """The metadata of a wheel."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return BytesParser().parsebytes(archive.read(name))


def faults(folder: Path, tag: str, changelog: str) -> Iterator[str]:
    """What is wrong with the files of a release."""
    wheels, sdists = sorted(folder.glob("*.whl")), sorted(folder.glob("*.tar.gz"))
    if (len(wheels), len(sdists)) != (1, 1):
        yield f"there are {len(wheels)} wheels and {len(sdists)} sdists, not one of each"
        return
    version = str(facts_of(wheels[0])["Version"])
    for file, name in (
        (wheels[0], f"{PACKAGE}-{version}-py3-none-any.whl"),
        (sdists[0], f"{PACKAGE}-{version}.tar.gz"),
    ):
        if file.name != name:
            yield f"{file.name} has version {version}: it should be {name}"
    if tag and tag != f"v{version}":
        yield f"the tag {tag} is not v{version}"
    dated = "unreleased|20\\d\\d-\\d\\d-\\d\\d" if not tag else "20\\d\\d-\\d\\d-\\d\\d"
    if not re.search(rf"^## {re.escape(version)} \(({dated})\)$", changelog, re.MULTILINE):
        yield f"CHANGELOG.md has no section for {version}" + (" with a date" if tag else "")
    with zipfile.ZipFile(wheels[0]) as archive:
        in_wheel = archive.namelist()
    with tarfile.open(sdists[0]) as archive:
        in_sdist = [member.name.partition("/")[2] for member in archive.getmembers() if not member.isdir()]
    yield from (f"{name} is in the wheel" for name in in_wheel if not TOPS.match(name) or UNWANTED.search(name))
    yield from (f"{name} is in the sdist" for name in in_sdist if UNWANTED.search(name))
    yield from (f"{name} is not in the wheel" for name in (f"{PACKAGE}/py.typed",) if name not in in_wheel)
    if not any(name.endswith("/licenses/LICENSE") for name in in_wheel):
        yield "the licence is not in the wheel"


def sums(files: Sequence[Path]) -> str:
    """The hashes of files, a line for each."""
    return "".join(f"{hashlib.sha256(file.read_bytes()).hexdigest()}  {file.name}\n" for file in files)


def bill_of_materials(wheel: Path) -> dict[str, Any]:
    """What a wheel is and requires, in CycloneDX 1.5."""
    facts = facts_of(wheel)
    name, version = str(facts["Name"]), str(facts["Version"])
    package = f"pkg:pypi/{name}@{version}"
    needs = [str(need) for need in facts.get_all("Requires-Dist", [])]
    parts = [
        {
            "type": "library",
            "bom-ref": need,
            "name": re.split(r"[^\w.-]", need, maxsplit=1)[0],
            "scope": "optional" if "extra ==" in need else "required",
            "properties": [{"name": "requirement", "value": need}],
        }
        for need in needs
        if not need.startswith(name)
    ]
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "version": 1,
        "metadata": {
            "component": {
                "type": "library",
                "bom-ref": package,
                "name": name,
                "version": version,
                "purl": package,
                "licenses": [{"license": {"id": str(facts["License-Expression"])}}],
                "hashes": [{"alg": "SHA-256", "content": hashlib.sha256(wheel.read_bytes()).hexdigest()}],
            }
        },
        "components": parts,
        "dependencies": [{"ref": package, "dependsOn": [part["bom-ref"] for part in parts]}],
    }


def main(words: Sequence[str]) -> int:
    """Check the files of a folder, and write the others beside them."""
    folder, tag = Path(words[0]), words[1] if len(words) > 1 else ""
    found = [*faults(folder, tag, CHANGELOG.read_text(encoding="utf-8"))]
    print(*found, sep="\n", end="\n" if found else "")
    if found:
        return 1
    for wheel in folder.glob("*.whl"):
        text = json.dumps(bill_of_materials(wheel), indent=2)
        wheel.with_suffix(".cdx.json").write_text(f"{text}\n", encoding="utf-8")
    files = sorted(file for file in folder.iterdir() if file.name != "SHA256SUMS")
    (folder / "SHA256SUMS").write_text(sums(files), encoding="utf-8")
    print(*(file.name for file in files), "SHA256SUMS", sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

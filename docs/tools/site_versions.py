"""Builds the site of each release and of the branch, side by side: `python docs/tools/site_versions.py build/site`.

Each version is built from its own commit, in a folder of its name: `0.1` for the newest v0.1.*, `dev` for the branch.
The theme's switch reads `versions.json`, and `index.html` leads to the latest release.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import re
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BRANCH = "dev"
_RELEASE = re.compile(r"v(\d+)\.(\d+)\.(\d+)")


def versions(tags: Iterable[str]) -> dict[str, str]:
    """The commit of each version of the site by its folder: the newest release of each minor first, the branch last."""
    releases = sorted(tuple(map(int, found.groups())) for tag in tags if (found := _RELEASE.fullmatch(tag)))
    newest = {f"{major}.{minor}": f"v{major}.{minor}.{patch}" for major, minor, patch in releases}
    return {**dict(reversed(newest.items())), BRANCH: "HEAD"}


def write_switch(site: Path, names: Iterable[str]) -> None:
    """Write the list of versions for the theme, the first as the latest, and the page that leads there."""
    latest, *others = names
    entries = [{"version": latest, "title": latest, "aliases": ["latest"]}]
    entries += [{"version": name, "title": name, "aliases": []} for name in others]
    (site / "versions.json").write_text(json.dumps(entries), encoding="utf-8")
    page = f'<!doctype html><meta http-equiv="refresh" content="0; url={latest}/"><a href="{latest}/">{latest}</a>\n'
    (site / "index.html").write_text(page, encoding="utf-8")


def build(commit: str, folder: Path, environ: Mapping[str, str]) -> None:
    """Build the site of a commit, in which mkdocs takes broken links for errors."""
    content = subprocess.run(["git", "archive", commit], cwd=ROOT, stdout=subprocess.PIPE, check=True).stdout
    with tempfile.TemporaryDirectory() as copy:
        with tarfile.open(fileobj=io.BytesIO(content)) as archive:
            archive.extractall(copy, filter="data")
        command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
        subprocess.run(command, cwd=copy, env=environ, check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("site", type=Path, help="the folder for all versions")
    site = parser.parse_args().site.absolute()
    tags = subprocess.run(["git", "tag"], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True).stdout.split()
    commits = versions(tags)
    address = os.environ.get("SITE_URL", "").rstrip("/")
    for name, commit in commits.items():
        # Links within the site are relative; this is for its map and its canonical addresses.
        build(commit, site / name, {**os.environ, "SITE_URL": address and f"{address}/{name}/"})
    write_switch(site, commits)


if __name__ == "__main__":
    main()

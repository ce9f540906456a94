"""Those parts of a build that pyproject.toml cannot say: the project's address, links that lead there, a whole sdist.

The address is that of the repository in which the build runs on GitHub, or the https address of git's remote `origin`;
in an sdist, that with which the sdist was built. Where there is none, the description has no links to files. Links to
pages lead to the built documentation if the variable SITE_URL has its address.
"""

import gzip
import os
import re
import shutil
import subprocess
import tarfile
from email import message_from_string
from pathlib import Path

from setuptools import setup
from setuptools.command.sdist import sdist

HERE = Path(__file__).resolve().parent
# A link of Markdown to a file of the project: its text, its target. Links to places in the README itself stay.
LINK = re.compile(r"(?<!!)\[([^\]\[]*)\]\((?![a-z]+:|#)([^)\s]+)\)")
PICTURE = re.compile(r"!\[([^\]\[]*)\]\((?![a-z]+:)([^)\s]+)\)\n*")
EVERYTHING = (".ci", ".github", "benchmarks", "docs", "examples", "patches", "test")
FILES = (
    *("CHANGELOG.md", "CODE_OF_CONDUCT.md", "CONTRIBUTING.md", "GOVERNANCE.md", "MAINTAINERS.md", "SECURITY.md"),
    *("mkdocs.yml", "run_test.py"),
)
HIDDEN = (".gitignore", ".pre-commit-config.yaml")
UNWANTED = shutil.ignore_patterns("__pycache__", "*.pyc", ".torch_testing_ext", ".hypothesis", "build")


def address() -> str:
    if repository := os.environ.get("GITHUB_REPOSITORY"):
        return f"{os.environ.get('GITHUB_SERVER_URL', 'https://github.com')}/{repository}"
    if (HERE / "PKG-INFO").exists():
        return url_of_sdist("Source")
    try:
        command = ["git", "-C", str(HERE), "remote", "get-url", "origin"]
        remote = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    except OSError:
        return ""
    return remote.removesuffix(".git").rstrip("/") if remote.startswith("https://") and "@" not in remote else ""


def url_of_sdist(name: str) -> str:
    facts = HERE / "PKG-INFO"
    urls = message_from_string(facts.read_text(encoding="utf-8")).get_all("Project-URL", []) if facts.exists() else []
    return next((url.removeprefix(f"{name}, ") for url in urls if url.startswith(f"{name}, ")), "")


def site(source: str) -> str:
    if given := os.environ.get("SITE_URL", "").rstrip("/"):
        return given
    known = url_of_sdist("Documentation")
    return "" if known.startswith(source) else known


def description(source: str, site: str) -> str:
    readme = (HERE / "README.md").read_text(encoding="utf-8")
    readme = PICTURE.sub(rf"![\1]({source}/raw/HEAD/\2)\n\n" if source else "", readme)
    if source:
        readme = readme.replace("git+ADDRESS", f"git+{source}")
    if site:
        # As mkdocs names pages.
        readme = re.sub(r"\]\((docs/[^)\s#]+)\.md(#[^)\s]*)?\)", rf"]({site}/\1/\2)", readme)
    return LINK.sub(rf"[\1]({source}/blob/HEAD/\2)" if source else r"\1", readme)


def urls(source: str, site: str) -> dict[str, str]:
    pages = {
        "Documentation": "blob/HEAD/docs/get-started/install.md",
        "Changelog": "blob/HEAD/CHANGELOG.md",
        "Issues": "issues",
    }
    found = {"Source": source, **{name: f"{source}/{path}" for name, path in pages.items()}} if source else {}
    return {**found, "Documentation": site} if site else found


class WholeSdist(sdist):
    """Adds what works on the package: documents, tests with their symbolic links, tools.

    With SOURCE_DATE_EPOCH, the same files give the same bytes, as those of a wheel do.
    """

    def make_release_tree(self, base_dir, files):
        super().make_release_tree(base_dir, files)
        for name in EVERYTHING:
            shutil.copytree(HERE / name, Path(base_dir, name), symlinks=True, ignore=UNWANTED, dirs_exist_ok=True)
        for name in FILES + HIDDEN:
            shutil.copy(HERE / name, base_dir)

    def make_archive(self, base_name, format, root_dir=None, base_dir=None, **owner):
        epoch = os.environ.get("SOURCE_DATE_EPOCH")
        if not epoch or format != "gztar":
            return super().make_archive(base_name, format, root_dir, base_dir, **owner)
        moment, name = int(epoch), f"{base_name}.tar.gz"

        def of_nobody(member):
            member.mode = 0o755 if member.isdir() or member.mode & 0o100 else 0o644
            member.mtime, member.uid, member.gid, member.uname, member.gname = moment, 0, 0, "", ""
            return member

        with (
            open(name, "wb") as file,
            gzip.GzipFile("", "wb", mtime=moment, fileobj=file) as packed,
            tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as archive,
        ):
            for path in (Path(base_dir), *sorted(Path(base_dir).rglob("*"))):
                archive.add(path, recursive=False, filter=of_nobody)
        return name


# setuptools would pack modules that an earlier build left there, although they are gone.
shutil.rmtree(HERE / "build" / "lib", ignore_errors=True)
SOURCE = address()
SITE = site(SOURCE)
setup(
    cmdclass={"sdist": WholeSdist},
    long_description=description(SOURCE, SITE),
    long_description_content_type="text/markdown",
    project_urls=urls(SOURCE, SITE),
)

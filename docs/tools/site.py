"""Gives mkdocs the pages of the project at their own places, and a page of reference for each public module.

A hook of mkdocs (`hooks` in mkdocs.yml). mkdocs knows one folder of pages; README.md, CONTRIBUTING.md and the pages of
examples/ are outside of docs/, and their links are relative to where they are.
"""

import ast
import json
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "torch_testing_ext"
PAGES = ("*.md", "docs/**/*.md", "examples/**/*", "benchmarks/*.md", "patches/**/*.md")
# Links lead to these files, which are shown as they are.
OTHERS = ("LICENSE", "docs/found/**/*.py", "docs/pictures/*")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Name the version that the site describes."""
    (version,) = re.findall(r'(?m)^__version__ = "(.*)"$', (PACKAGE / "__init__.py").read_text(encoding="utf-8"))
    config.site_name = f"{config.site_name} {version}"
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Replace the files of docs/ by all pages, and keep those of the theme."""
    for file in [*files]:
        if file.src_dir == config.docs_dir:
            files.remove(file)
    for path in sorted({path for pattern in (*PAGES, *OTHERS) for path in ROOT.glob(pattern) if path.is_file()}):
        name = path.relative_to(ROOT).as_posix()
        files.append(File.generated(config, name, abs_src_path=str(path)))
    modules = public_modules()
    files.append(File.generated(config, "reference/index.md", content=overview_of(modules)))
    for module in modules:
        files.append(File.generated(config, f"reference/{module}.md", content=page_of(module)))
    config.nav = [reference(entry, modules) for entry in config.nav]
    return files


def on_page_markdown(markdown: str, **_: object) -> str:
    """Titles of issues begin with words in brackets, which mkdocstrings takes for the name of a link."""
    return markdown.replace("# [distributed][", "# [distributed]\\[").replace("# [FSDP][", "# [FSDP]\\[")


def public_modules() -> list[str]:
    """The modules that users import: the mirror of PyTorch's, and our own beside them."""
    files = [*PACKAGE.glob("*.py"), *(PACKAGE / "distributed").rglob("*.py")]
    names = [".".join(file.relative_to(ROOT).with_suffix("").parts) for file in files if file.name != "__init__.py"]
    return sorted(names)


def source_of(module: str) -> ast.Module:
    return ast.parse((ROOT / f"{module.replace('.', '/')}.py").read_text(encoding="utf-8"))


def overview_of(modules: list[str]) -> str:
    """The page that lists the modules, each with the first line of its docstring."""
    lines = [(ast.get_docstring(source_of(module)) or "").partition("\n")[0] for module in modules]
    rows = [f"| [{module}]({module}.md) | {line} |" for module, line in zip(modules, lines, strict=True)]
    return "\n".join(["# Python API", "", "| module | |", "| --- | --- |", *rows, ""])


def page_of(module: str) -> str:
    """The page of reference of a module."""
    names = public_names(source_of(module))
    options = f"    options:\n      members: {json.dumps(names)}\n"
    return f"# {module}\n\n::: {module}\n{options}"


def public_names(tree: ast.Module) -> list[str]:
    """The names that a module defines for others, or imports for them (`import x as x`, `*`) from our own modules."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(PACKAGE.name):
            found |= {alias.name for alias in node.names if alias.asname == alias.name}
            if node.names[0].name == "*":
                source = ROOT / f"{(node.module or '').replace('.', '/')}.py"
                found |= set(public_names(ast.parse(source.read_text(encoding="utf-8"))))
    found |= {node.name for node in tree.body if isinstance(node, (ast.ClassDef, ast.FunctionDef))}
    return sorted(name for name in found if not name.startswith("_"))


def reference(entry: object, modules: list[str]) -> object:
    """Fill the entry of the navigation that stands for the pages of all modules, wherever it is."""
    if entry == {"Python API": "reference/"}:
        return {"Python API": [f"reference/{name}.md" for name in ("index", *modules)]}
    if isinstance(entry, dict):
        return {
            name: [reference(part, modules) for part in parts] if isinstance(parts, list) else parts
            for name, parts in entry.items()
        }
    return entry

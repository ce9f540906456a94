"""Files that are of another version of PyTorch than the installed torch, and so need names that it lacks."""

from importlib import metadata
from pathlib import Path

from torch_testing_ext._process.project_folder import root_of_checkout

from . import mapping


def advice(error: BaseException, path: str) -> str:
    """Advice on a file whose import failed since the installed torch has no such name or module; or ""."""
    of_attribute = getattr(getattr(error, "obj", None), "__name__", None)
    module = error.name if isinstance(error, ImportError) else of_attribute
    if not f"{module}.".startswith("torch."):
        return ""
    if removed := _in_removed_package(str(module)):
        return removed
    version = metadata.version("torch").partition("+")[0]
    file = root_of_checkout(Path(path)) / "version.txt"
    whose = f"PyTorch {file.read_text().strip()}" if file.is_file() else "another version of PyTorch"
    return (
        f"The file is of {whose}, and torch {version} lacks what it uses of {module}.\n"
        f"Run a file of that version (in the checkout: git checkout v{version}), or install the torch of the file."
    )


def _in_removed_package(module: str) -> str:
    """Advice if the module is, or would be, in a package that PyTorch removed, and that we have in part; or ""."""
    removed = {pair.theirs: pair.until for pair in mapping.MIRRORED if pair.until is not None}
    package = next((name for name in removed if f"{module}.".startswith(f"{name}.")), None)
    if package is None:
        return ""
    version = "{}.{}".format(*removed[package])
    have = " and ".join(name for name in removed if name != package)
    return (
        f"PyTorch {version} removed {package}, so the file can't run here as it is.\n"
        f"This package has {have} in its place, without what the file uses."
    )

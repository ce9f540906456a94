"""The site of a run: this machine, or a cluster."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path

from . import doors
from .options import CannotRun, Options, UsageError
from .site_protocol import OpenSite, RunSite

# pyproject.toml declares the same.
OWN_SITES = {
    "ray": "torch_testing_ext.runner.cluster.cluster_site:on_ray",
    "slurm": "torch_testing_ext.runner.cluster.cluster_site:on_slurm",
}


def is_of_ray(cluster: str) -> bool:
    """Whether the value of --cluster is the address of a Ray cluster, and not the name of a site."""
    return cluster == "auto" or not cluster.isidentifier()


def site_of(options: Options, root: Path, files: Sequence[str]) -> AbstractContextManager[RunSite]:
    if options.cluster is None:
        from .run_site import on_this_machine

        return on_this_machine(options, root, files)
    sites = doors.entries(doors.SITES, OWN_SITES)
    of_ray = sites.pop("ray")
    entry = of_ray if is_of_ray(options.cluster) else sites.get(options.cluster)
    if entry is None:
        raise UsageError(f"--cluster {options.cluster} is not auto, {', '.join(sites)}, HOST:PORT or ray://HOST:PORT")
    try:
        open_site: OpenSite = entry.load()
    except Exception as error:
        why = f"{type(error).__name__}: {error}"
        raise CannotRun(f"--cluster {options.cluster}: {entry.value} could not be loaded: {why}") from error
    return open_site(options, root, files)

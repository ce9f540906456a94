"""Ranks that inherit what this process has set up by now, and ranks that inherit nothing of it."""

from __future__ import annotations

import os
from typing import Any

from . import client, settings
from .fork_server_messages import StartMethod
from .job import Job, Named

START = "TORCH_TESTING_EXT_START"


def launch_from_here(job: Job, inherited: Any = None) -> client.Run:
    """Start the ranks of a job, forked from this process as it is now. Their fork server ends with them.

    `inherited` is an object of this process that they get in their contexts.

    Raises CannotStart if it is not safe to fork, or if the setting wants another start method.
    """
    job = settings.complete(job)
    wanted = settings.wanted_start(job)
    if StartMethod.FORK not in client.allowed_methods(wanted):
        raise client.CannotStart(
            "these ranks inherit what this process has set up, so they have to be forked, "
            + ("but --sanitize=hash needs new interpreters" if job.differs_in_hash else f"but {START}={wanted}")
        )
    launcher = client.launcher()
    server, unusable = launcher.try_method(StartMethod.FORK, job.names[-1], inherited)
    if server is None:
        raise client.CannotStart(
            f"these ranks inherit what this process has set up, so they have to be forked, which is unsafe: {unusable}"
        )
    try:
        run = launcher.launch_on(server, job)
        run.owns_server = True
        return run
    except client.ServerUnfit as why:
        server.close()
        raise client.CannotStart(f"the ranks could not be started: {why}") from None
    except BaseException:
        server.close()
        raise


class FreshLauncher(client.Launcher):
    """Starts ranks that have nothing of this process: their fork server is a new interpreter, which serves them all."""

    def try_method(
        self, method: StartMethod, subject: Named, inherited: Any = None
    ) -> tuple[client.ForkServerClient | None, str]:
        if method is StartMethod.FORK:
            return None, "these ranks inherit nothing"
        return super().try_method(method, subject, inherited)


_fresh = FreshLauncher()


def launch_fresh(job: Job) -> client.Run:
    """Start the ranks of a job in the state of a new interpreter, which imports torch once. Raises CannotStart."""
    global _fresh
    if _fresh.owner != os.getpid():
        _fresh = FreshLauncher()
    return _fresh.launch(job)


def preload_hints() -> tuple[str, ...]:
    """Modules of torch that earlier ranks of this process had to import by themselves."""
    return tuple(client.launcher().preload_hints)

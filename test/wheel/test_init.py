"""`torchtest init` in an empty folder, and the job that it writes: its commands, in a shell, in a new environment."""

from __future__ import annotations

import os
import shutil
import subprocess
from functools import partial
from pathlib import Path

import pytest
import yaml
from stranger import Stranger, wheels_of

REQUIREMENTS = {"by-itself": {}, "requirements": {"requirements.txt": "torch-testing-ext\n"}}


@pytest.mark.parametrize("files", REQUIREMENTS.values(), ids=REQUIREMENTS.keys())
def test_the_job(stranger: Stranger, tmp_path: Path, request: pytest.FixtureRequest, files: dict[str, str]) -> None:
    stranger.write(files)
    printed = stranger.types("torchtest init")
    assert printed.endswith("\n1 passed, 0 failed, 0 skipped\n")
    text = (stranger.project / ".github" / "workflows" / "torchtest.yml").read_text(encoding="utf-8")
    (job,) = yaml.safe_load(text)["jobs"].values()
    # The index with CPU builds is one that not every machine reaches.
    assert job["env"] == {"UV_TORCH_BACKEND": "cpu"}
    environment = new_environment(stranger.environment, tmp_path / "of_job")
    request.addfinalizer(partial(shutil.rmtree, environment))
    stranger.environ.update(
        VIRTUAL_ENV=str(environment),
        PATH=os.pathsep.join([str(environment / "bin"), stranger.environ["PATH"]]),
        UV_FIND_LINKS=str(wheels_of(stranger.environment)),
    )
    commands = [step["run"] for step in job["steps"] if "run" in step]
    assert len(commands) == 2
    for command in commands:
        printed = stranger.types(command)
    assert printed.endswith("\n1 passed, 0 failed, 0 skipped\n")
    (upload,) = (step["with"]["path"] for step in job["steps"] if "upload-artifact" in step.get("uses", ""))
    assert all((stranger.project / name).stat().st_size for name in upload.split())
    assert "torch_testing_ext" in stranger.types(
        "which torchtest && python -c 'import torch_testing_ext as kit; print(kit)'"
    )


def new_environment(environment: Path, folder: Path) -> Path:
    """An environment with torch, which is large, and without what the job has to bring.

    By symbolic links: each hard link that comes or goes changes a file that the warm servers of other tests have read.
    """
    subprocess.run(["cp", "--archive", "--symbolic-link", environment.absolute(), folder], check=True)
    unwanted = ["torch-testing-ext", "pytest", "pytest-xdist", "pytest-cov", "rich"]
    pip = [str(folder / "bin" / "python"), "-m", "pip", "uninstall", "--quiet", "--yes"]
    subprocess.run([*pip, *unwanted], check=True)
    return folder

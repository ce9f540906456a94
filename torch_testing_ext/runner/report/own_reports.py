"""Our own reports, which come in by the same door as those of others; each is imported if it is asked for."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from torch_testing_ext.launch.aspects.lanes import PERFETTO
from torch_testing_ext.runner.events import Reporter

from .file_report import FileReport
from .report_request import ReportRequest


def junit(request: ReportRequest) -> Reporter | None:
    """The run as JUnit XML, with `--junitxml`."""
    file = request.options.junitxml
    if file is None:
        return None
    from . import junit

    return FileReport(file, junit.render_junit, request.warn)


def html(request: ReportRequest) -> Reporter | None:
    """The run as a page, with `--html`."""
    file = request.options.html
    if file is None:
        return None
    from .page import html_page

    render = partial(html_page.render_page, command=request.command, changes=request.changes)
    return FileReport(file, render, request.warn)


def perfetto(request: ReportRequest) -> Reporter | None:
    """The run as a trace for Perfetto, with `--perfetto`."""
    file = request.options.value(PERFETTO)
    if file is None:
        return None
    from . import perfetto

    return FileReport(file, perfetto.render_perfetto, request.warn)


def json(request: ReportRequest) -> Reporter | None:
    """The run as JSON, with `--results`."""
    file = request.options.results
    if file is None:
        return None
    from . import json_results

    return FileReport(file, json_results.render_json, request.warn)


def github(request: ReportRequest) -> Reporter | None:
    """Annotations and the summary of the step, in a workflow of GitHub."""
    if request.is_over or request.environ.get("GITHUB_ACTIONS") != "true":
        return None
    from .github import GitHub

    step_summary = request.environ.get("GITHUB_STEP_SUMMARY")
    return GitHub(request.console, Path(step_summary) if step_summary else None)

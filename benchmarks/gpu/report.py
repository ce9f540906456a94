"""gpu.json and gpu.md: what the checks have found."""

from __future__ import annotations

import time
from collections import Counter
from typing import Any

FORMAT = "torch_testing_ext gpu 1"
SIGNS = {"passed": "passed", "failed": "**FAILED**", "skipped": "skipped", "not run": "**not run**"}


def document(run: Any) -> dict[str, Any]:
    """Everything, as data."""
    return {
        "format": FORMAT,
        "began": time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(run.clock)),
        "seconds": round(time.monotonic() - run.began, 1),
        "quick": run.quick,
        "facts": run.facts,
        "exit_code": run.exit_code,
        "checks": [_check(one) for one in run.outcomes],
    }


def _check(one: Any) -> dict[str, Any]:
    return {
        "name": one.plan.name,
        "title": one.plan.title,
        "part": one.part,
        "status": one.status,
        "why": one.why,
        "seconds": round(one.seconds, 2),
        "limit": round(one.limit, 1),
        "holds": one.held,
        "broken": one.broken,
        "figures": one.figures,
        "notes": one.notes,
        "output": one.tail if one.status == "failed" else "",
    }


def counts(checks: list[dict[str, Any]]) -> str:
    found = Counter(one["status"] for one in checks)
    return ", ".join(f"{found[status]} {status}" for status in SIGNS if found[status]) or "no check has run"


def markdown(content: dict[str, Any]) -> str:
    """The same for people."""
    facts = content["facts"]
    devices = facts.get("devices") or []
    name = f"{len(devices)} x {devices[0]['name']}" if devices else "no GPU"
    quick = ", --quick" if content["quick"] else ""
    lines = [f"# {name}, torch {facts.get('torch', '?')}", ""]
    lines += [f"{content['began']}, {content['seconds']:g} s{quick}: {counts(content['checks'])}.", ""]
    lines += ["| | |", "| --- | --- |"]
    lines += [f"| {key} | {_cell(_fact(value))} |" for key, value in facts.items()]
    lines += ["", "| check | result | time | |", "| --- | --- | --- | --- |"]
    for one in content["checks"]:
        part = " (on the CPU)" if one["part"] == "cpu" and one["status"] != "skipped" else ""
        lines.append(f"| {one['name']} | {SIGNS[one['status']]}{part} | {one['seconds']:.1f} s | {_cell(one['why'])} |")
    for one in content["checks"]:
        lines += _section(one)
    return "\n".join(lines) + "\n"


def _section(one: dict[str, Any]) -> list[str]:
    if not (one["holds"] or one["broken"] or one["figures"] or one["notes"] or one["output"]):
        return []
    lines = ["", f"## {one['name']}", "", one["title"], ""]
    lines += [f"- DOES NOT HOLD: {text}" for text in one["broken"]]
    lines += [f"- holds: {text}" for text in one["holds"]]
    lines += [f"- note: {text}" for text in one["notes"]]
    if one["figures"]:
        lines += ["", "| figure | |", "| --- | --- |"]
        lines += [f"| {_cell(figure['name'])} | {_number(figure)} |" for figure in one["figures"]]
    if one["output"]:
        lines += ["", "```", *one["output"].replace("```", "'''").splitlines()[-60:], "```"]
    return lines


def _number(figure: dict[str, Any]) -> str:
    value = figure["value"]
    shown = f"{value:.4g}" if isinstance(value, float) else str(value)
    return _cell(f"{shown} {figure['unit']}".strip())


def _fact(value: Any) -> str:
    if isinstance(value, list):
        return "; ".join(map(_fact, value))
    if isinstance(value, dict):
        return ", ".join(f"{key} {one}" for key, one in value.items())
    return str(value)


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "\\|").split())

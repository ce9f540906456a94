"""Train all sound programs and planted mistakes of our tests under their layouts, and record what is told.

    python benchmarks/layouts.py build/layouts.tsv                5 seeds, float64 and bfloat16
    python benchmarks/layouts.py build/layouts.tsv --seeds 3 4 --dtypes float64
    python benchmarks/layouts.py build/layouts.tsv --planted      the mistakes
    python benchmarks/layouts.py build/layouts.tsv --summary      what the rows add up to
    python benchmarks/layouts.py build/costs.tsv --costs          five layouts with three steps

It goes on where it was stopped. The programs and mistakes are those of `layout_tables.py` in
test/torch_testing_ext/layouts. A sound program about which something is told is an alarm. A mistake is told if its
tensor, kind and axis are, or the module that has it. The exit code is 1 if there is an alarm, or a mistake that is not
told, or the five layouts take more than 4.5 CPU seconds of their ranks together.
"""

from __future__ import annotations

import argparse
import csv
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from torch_testing_ext._testing.bases.rank_verdicts import RankError, RankFailure
from torch_testing_ext.layouts import LayoutError, check_layouts

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "test/torch_testing_ext/layouts"))

import layout_tables as tables  # noqa: E402

COLUMNS = ("program", "layout", "dtype", "seed", "outcome", "compared", "not compared", "worst", "cpu", "text")
# By their names in the table.
COSTS = {"tp": "tp=2", "fsdp2": "dp=2", "tp and fsdp2": "dp=2 tp=2", "1f1b": "pp=2", "ring": "cp=2"}
MOST_SECONDS = 4.5
SILENT, ALARM, TOLD, UNTOLD = "silent", "ALARM", "told", "NOT TOLD"


def sound_rows(seeds: Sequence[int], dtypes: Sequence[str], done: set[tuple[str, ...]]) -> Iterator[list[Any]]:
    """Check each sound program in each type with each seed; all layouts of a program share its reference."""
    for seed in seeds:
        for dtype in dtypes:
            for name, (train, *texts) in tables.SOUND.items():
                left = [text for text in texts if (name, text, dtype, str(seed)) not in done]
                if left:
                    yield from checked(name, train, texts, dtype, seed)


def checked(name: str, train: Any, texts: Sequence[str], dtype: str, seed: int) -> Iterator[list[Any]]:
    try:
        reports = check_layouts(train, *texts, seed=seed, dtypes=(getattr(torch, dtype),))
    except LayoutError as error:
        reports = error.reports
    except (RankError, RankFailure) as error:
        yield [name, texts[0], dtype, seed, ALARM, 0, "", 0, 0, in_a_line(str(error))]
        return
    for report in reports:
        left_out = "; ".join(f"{tensor}: {why}" for tensor, why in report.not_compared.items())
        outcome, text = (SILENT, report.remark) if report.is_right else (ALARM, report.summary)
        numbers = [report.compared, left_out, f"{report.worst:.2f}", f"{report.seconds:.2f}"]
        yield [name, report.layout, dtype, seed, outcome, *numbers, in_a_line(text)]


def cost_rows() -> Iterator[list[Any]]:
    """Check five layouts with three steps."""
    tables.of_torch.STEPS = 3
    for name, layout in COSTS.items():
        yield from checked(name, tables.SOUND[name][0], [layout], "float64", 1234)


def planted_rows(done: set[tuple[str, ...]]) -> Iterator[list[Any]]:
    """Check each planted mistake."""
    for number, function, mistakes, layout, *wanted in (*tables.PLANTED, *tables.VARIANTS, *tables.BY_MODULE):
        name = f"{number}: {', '.join(mistakes)}"
        if (name, layout, "float64", "1234") in done:
            continue
        began = time.process_time()
        try:
            check_layouts(tables.planted(function, *mistakes), layout)
            outcome, text = UNTOLD, "silent"
        except LayoutError as error:
            outcome, text = (TOLD if is_told(error, wanted) else UNTOLD), error.account
        seconds = f"{time.process_time() - began:.2f}"
        yield [name, layout, "float64", 1234, outcome, 0, "", 0, seconds, in_a_line(text)]


def is_told(error: LayoutError, wanted: Sequence[str]) -> bool:
    """Whether the module is told, or a reason of this tensor, kind and axis."""
    if len(wanted) == 1:
        return wanted[0] in error.account
    name, kind, axis = wanted
    finding = error.reports[0].finding
    reasons = [] if finding is None else [(finding.name, reason.kind, reason.axis) for reason in finding.reasons]
    return (name, kind, axis) in reasons


def in_a_line(text: str) -> str:
    return " ".join(text.split())[:400]


def read(file: Path) -> list[dict[str, str]]:
    with file.open(newline="") as lines:
        return list(csv.DictReader(lines, delimiter="\t"))


def summarize(rows: Sequence[dict[str, str]]) -> int:
    """Print what the rows add up to. The exit code."""
    sound = [row for row in rows if row["outcome"] in (SILENT, ALARM)]
    for dtype in dict.fromkeys(row["dtype"] for row in sound):
        own = [row for row in sound if row["dtype"] == dtype]
        programs, layouts = {row["program"] for row in own}, {(row["program"], row["layout"]) for row in own}
        seeds, alarms = {row["seed"] for row in own}, [row for row in own if row["outcome"] == ALARM]
        of = f"{len(programs)} programs, {len(layouts)} layouts, {len(seeds)} seeds"
        compared = sum(int(row["compared"]) for row in own)
        print(f"{dtype}: {len(own)} trainings of {of}: {len(alarms)} alarms; {compared:,} tensors compared")
        print(f"  worst multiple of rounding: {max(float(row['worst']) for row in own):.2f}")
        left_out: dict[str, set[str]] = {}
        for row in own:
            for each in filter(None, row["not compared"].split("; ")):
                left_out.setdefault(each.rpartition(": ")[2], set()).add(f"{row['program']} {row['layout']}")
        for why, where in left_out.items():
            print(f"  not compared, {why}: {', '.join(sorted(where))}")
    told = [row for row in rows if row["outcome"] in (TOLD, UNTOLD)]
    print(f"planted mistakes: {sum(row['outcome'] == TOLD for row in told)} of {len(told)} told")
    wrong = [row for row in rows if row["outcome"] in (ALARM, UNTOLD)]
    for row in wrong:
        print(f"{row['outcome']}: {row['program']} {row['layout']} {row['dtype']} {row['seed']}: {row['text']}")
    return 1 if wrong else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, help="where rows are written, and read if it exists")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3, 4, 5])
    parser.add_argument("--dtypes", nargs="+", default=["float64", "bfloat16"])
    parser.add_argument("--planted", action="store_true", help="the mistakes instead of sound programs")
    parser.add_argument("--costs", action="store_true", help="five layouts with three steps instead of sound programs")
    parser.add_argument("--summary", action="store_true", help="only print what the rows add up to")
    options = parser.parse_args()
    rows = read(options.file) if options.file.exists() else []
    if not options.summary:
        done = {(row["program"], row["layout"], row["dtype"], row["seed"]) for row in rows}
        options.file.parent.mkdir(parents=True, exist_ok=True)
        with options.file.open("a", newline="") as file:
            write = csv.writer(file, delimiter="\t", lineterminator="\n")
            if not rows:
                write.writerow(COLUMNS)
            made = sound_rows(options.seeds, options.dtypes, done)
            made = planted_rows(done) if options.planted else cost_rows() if options.costs else made
            for row in made:
                write.writerow(row)
                file.flush()
        rows = read(options.file)
    if options.costs:
        seconds = sum(float(row["cpu"]) for row in rows[-len(COSTS) :])
        print(f"{seconds:.2f} CPU seconds of ranks; at most {MOST_SECONDS}")
        return summarize(rows) or int(seconds > MOST_SECONDS)
    return summarize(rows)


if __name__ == "__main__":
    sys.exit(main())

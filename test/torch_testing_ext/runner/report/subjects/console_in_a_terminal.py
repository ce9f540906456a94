import os
import sys

from kit.invented_runs import TestOutcome, finished_test, run_events

from torch_testing_ext.runner.options import Options
from torch_testing_ext.runner.report import make_reporters

reporters = make_reporters(Options(), sys.stdout, os.environ)
live = next((reporter for reporter in reporters.reporters if type(reporter).__name__ == "Live"), None)
results = [finished_test("test_a", TestOutcome.PASSED), finished_test("test_bad", TestOutcome.FAILED)]
for event in run_events(results, devices=("0",)):
    reporters.on_event(event)
    if live and live._region.is_started:
        live._region.refresh()

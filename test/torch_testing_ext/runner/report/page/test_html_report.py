"""The HTML report: its content, and its behaviour in a browser."""

import re
import shlex
import tempfile
import unittest
import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path

import pytest
from kit.browser import Browser, needs_chromium
from kit.files import subject
from kit.invented import make_attempt
from kit.invented_runs import (
    SCREEN,
    a_test,
    attempt,
    every_outcome,
    finished_in_world,
    hang_of_ranks,
    history_of,
    ranks,
)

from torch_testing_ext._collectives.failure import Value
from torch_testing_ext._tests.outcomes import TestOutcome
from torch_testing_ext.runner.model import FinishedTest, Lease, NodeOfRun, Policy, RunHeader, Test, TestId
from torch_testing_ext.runner.report.page import failure_part, html_page, timeline
from torch_testing_ext.runner.report.wording import printable

VISIBLE = "[...document.querySelectorAll('.test:not([hidden])')].map((test) => test.id)"
OPEN = "[...document.querySelectorAll('.test[open]')].map((test) => test.id)"


# The contrast of the colours of each text with what is behind it, as WCAG defines it; the worst first.
CONTRASTS = subject(__file__, "contrasts.js")


EXAMPLE = f"{a_test('').id.file}::{a_test('').id.cls}::"


def one_of_many(number):
    """A test of a large run: a few fail or are skipped."""
    outcome = {0: TestOutcome.FAILED, 7: TestOutcome.SKIPPED}.get(number % 500, TestOutcome.PASSED)
    file = f"test/distributed/sub/test_collectives_{number // 50}.py"
    test = Test(TestId(file, "CollectiveTest", f"test_all_reduce_{number}[float32]"), world_size=1 + number % 3)
    lease = Lease((), (number // 10 % 4,), node=f"m{number % 10}")
    message = "AssertionError: 1 != 2\nmore" if outcome is TestOutcome.FAILED else ""
    return FinishedTest((make_attempt(test, outcome, message, seconds=0.1, began=number // 40 * 0.2, lease=lease),))


@needs_chromium
class InABrowserTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.browser = Browser().__enter__()
        cls.addClassCleanup(cls.browser.__exit__)

    def open(self, finished, fragment="", changes=None, **run):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        file = Path(folder.name, "report.html")
        page = html_page.render_page(history_of(finished, **run), "torchtest", changes)
        file.write_text(page, encoding="utf-8")
        self.browser.open(file, fragment)
        return file

    def ask(self, expression):
        return self.browser.evaluate(expression)

    def search(self, words):
        self.ask(f"search.value = {words!r}; search.dispatchEvent(new Event('input')); null")

    def press(self, outcome):
        self.ask(f"document.querySelector('.chip[data-outcome=\"{outcome}\"]').click()")

    def outcomes(self):
        return self.ask("[...document.querySelectorAll('.test:not([hidden])')].map((test) => test.classList[1])")

    def test_everything_is_shown_and_nothing_is_fetched(self):
        finished = every_outcome()
        file = self.open(finished)
        self.assertEqual(len(self.ask(VISIBLE)), len(finished))
        self.assertEqual(self.ask("document.querySelector('h1').textContent"), "6 of 12 tests failed")
        fetched = [url for url in self.browser.requests() if not url.startswith("data:")]
        self.assertEqual(fetched, [file.as_uri()])
        self.assertEqual(self.browser.complaints(), [])

    def test_filtering_by_outcome(self):
        self.open(every_outcome())
        self.press("flaky")
        self.assertEqual(self.outcomes(), ["flaky"])
        self.press("skipped")
        self.assertEqual(sorted(self.outcomes()), ["flaky", "skipped", "skipped"])
        self.assertEqual(self.ask("document.getElementById('shown').textContent"), "3 of 12 tests")
        self.press("flaky")
        self.press("skipped")
        self.assertEqual(len(self.outcomes()), 12)

    def test_searching_names_messages_and_logs(self):
        logs = ranks(["step 1", "loss is NaN"])
        finished = (*every_outcome(), FinishedTest((attempt("test_with_logs", ranks=logs),)))
        self.open(finished)
        for words, expected in (
            ("test_leak", ["leaked"]),
            ("invalid SYNTAX", ["error"]),
            ("loss nan", ["passed"]),
            ("of no test at all", []),
        ):
            with self.subTest(words=words):
                self.search(words)
                self.assertEqual(self.outcomes(), expected)

    def test_the_first_failure_is_unfolded(self):
        self.open(every_outcome())
        self.assertEqual(self.ask(OPEN), ["test-1"])
        self.open((FinishedTest((attempt("test_good"),)),))
        self.assertEqual(self.ask(OPEN), [])

    def test_a_bar_of_the_timeline_links_to_its_test(self):
        self.open(every_outcome())
        self.press("skipped")
        self.ask("document.querySelector('.timeline a:has(.leaked)').dispatchEvent(new MouseEvent('click'))")
        # The hashchange event comes later than the click, so call its handler directly.
        self.ask("follow()")
        target = self.ask("document.querySelector(':target').classList[1]")
        self.assertEqual(target, "leaked")
        self.assertTrue(self.ask("document.querySelector(':target').open"))
        self.assertEqual(len(self.outcomes()), 12)

    def test_an_address_with_a_test_opens_it(self):
        self.open(every_outcome(), fragment="#test-5")
        self.assertIn("test-5", self.ask(OPEN))

    def test_a_bar_has_the_name_and_the_facts_of_its_test(self):
        self.open(every_outcome())
        link = "document.querySelector('.timeline a:has(.leaked)')"
        self.assertEqual(self.ask(f"{link}.ariaLabel"), f"{EXAMPLE}test_leaked")
        self.ask(f"{link}.firstChild.dispatchEvent(new PointerEvent('pointerover', {{bubbles: true}}))")
        title = self.ask(f"{link}.querySelector('title').textContent")
        self.assertRegex(title, f"^{EXAMPLE}test_leaked\n")
        self.assertIn("on cpu 0", title)

    def test_a_pass_says_how_to_run_it_when_it_is_clicked(self):
        names = ("test_odd[a'b c]", "test_good")
        self.open([FinishedTest((attempt(name),)) for name in names])
        self.ask("document.querySelectorAll('.test').forEach((test) => test.click())")
        commands = self.ask("[...document.querySelectorAll('.rerun code')].map((code) => code.textContent)")
        self.assertEqual(sorted(commands), sorted(f"torchtest {shlex.quote(EXAMPLE + name)}" for name in names))

    def test_filters(self):
        """By machine, need, and what is new, together with outcomes and words."""
        tests = [a_test(f"test_{number}", world_size=1 + number % 2) for number in range(4)]
        finished = [
            FinishedTest((attempt("", test=test, lease=Lease((), (0,), node=f"machine-{number // 2}")),))
            for number, test in enumerate(tests)
        ]
        self.open(finished, changes={tests[3].id: "new test", tests[0].id: "mended"})
        choices = "[...document.querySelectorAll('.filter')].map((f) => [f.name, ...[...f.options].map((o) => o.text)])"
        machines = ["machine", "all", "machine-0 (2)", "machine-1 (2)"]
        news = ["new", "all", "mended (1)", "new test (1)"]
        self.assertEqual(self.ask(choices), [machines, ["needs", "all", "2 ranks (2)"], news])
        names = "[...document.querySelectorAll('.test:not([hidden]) b')].map((name) => name.textContent)"

        def choose(name, value):
            choice = f"document.querySelector('.filter[name={name}]')"
            self.ask(f"{choice}.value = '{value}'; {choice}.dispatchEvent(new Event('change'))")
            return sorted(self.ask(names))

        self.assertEqual(choose("machine", "machine-1"), ["test_2", "test_3"])
        self.assertEqual(choose("needs", "2 ranks"), ["test_3"])
        self.search("test_2")
        self.assertEqual(self.ask(names), [])
        self.search("")
        choose("machine", "")
        self.assertEqual(choose("needs", ""), ["test_0", "test_1", "test_2", "test_3"])
        self.assertEqual(choose("new", "mended"), ["test_0"])
        self.assertEqual(self.ask("document.getElementById('shown').textContent"), "1 of 4 tests")
        self.open([FinishedTest((attempt("test_only"),))])
        self.assertEqual(self.ask("document.querySelectorAll('.filter').length"), 0)

    def test_the_same_test_of_two_machines(self):
        outcomes = {"a": TestOutcome.PASSED, "b": TestOutcome.FAILED}
        finished = [
            FinishedTest((attempt("test_x", outcome, lease=Lease((), (0,), node=node)),))
            for node, outcome in outcomes.items()
        ]
        self.open(finished, nodes=[NodeOfRun(node, (), 1) for node in outcomes])
        self.assertEqual(sorted(self.ask(VISIBLE)), ["test-1", "test-2"])
        lanes = "[...document.querySelectorAll('.head + .chart .lanes div')].map((lane) => lane.textContent)"
        self.assertEqual(self.ask(lanes), ["a cpu 0", "b cpu 0"])
        links = "[...document.querySelectorAll('.timeline a')].map((a) => a.getAttribute('href'))"
        self.assertEqual(self.ask(links), ["#test-2", "#test-1"])

    @pytest.mark.slow
    def test_10_000_tests_of_ten_machines(self):
        """Stay below 5 MB, and open within a second: of the browser's own time, as others may use the machine."""
        self.browser.measure()
        file = self.open(list(map(one_of_many, range(10_000))), nodes=[NodeOfRun(f"m{n}", (), 4) for n in range(10)])
        self.assertLess(file.stat().st_size, 5_000_000)
        self.assertEqual(self.ask("document.getElementById('shown').textContent"), "10000 tests")
        # Three times as long on a machine whose processors are slow.
        self.assertLess(self.browser.seconds_of_main_thread(), 3.0)

    def test_positions_of_bars(self):
        one = attempt("test_half", seconds=5.0, began=5.0, lease=Lease(("3",)))
        self.open((FinishedTest((one,)),), devices=("0", "3"), slots=1)  # a run of 12.5 s
        place = """(() => {
            const svg = document.querySelector('svg').getBoundingClientRect();
            const bar = document.querySelector('.bar').getBoundingClientRect();
            return [(bar.x - svg.x) / svg.width, bar.width / svg.width, bar.y - svg.y];
        })()"""
        left, width, top = self.ask(place)
        self.assertAlmostEqual(left, 0.4, places=2)
        self.assertAlmostEqual(width, 0.4, places=2)
        self.assertTrue(timeline.LANE < top < 2 * timeline.LANE, "it ran on the second device")

    def test_a_failure_of_ranks(self):
        self.open((hang_of_ranks(4), *every_outcome()))
        text = "[...document.querySelectorAll('#test-1 {}')].map((one) => one.textContent.trim())"
        self.assertEqual(self.ask(text.format(".headline")), [SCREEN.partition("\n")[0]])
        rows = ["rank 2after all_reduce #1 [4]test_x.py:25 in test_hang"]
        rows += ["ranks 0, 1, 3in all_reduce #2 [4]test_x.py:26 in test_hang"]
        self.assertEqual(self.ask(text.format(".ranks tr")), rows)
        self.assertEqual(self.ask(text.format(".culprit")), ['25      time.sleep(1000)  # "for ever"'])
        self.assertEqual(self.ask(text.format(".other")), ["26  dist.all_reduce(torch.ones(4))"])
        self.assertEqual(self.ask(text.format(".code .comment")), ['# "for ever"'])
        self.assertEqual(self.ask(text.format(".got")), ["Got:      [4.0]"])
        self.assertEqual(self.ask(text.format(".lanes div")), [f"rank {rank}" for rank in range(4)])
        self.assertEqual(self.ask(f"{text.format('.call.waits text')}.length"), 3)
        # The first arrow leads from rank 0, which came first, to rank 3; the second waits for rank 2.
        arrows = "[...document.querySelectorAll('.arrow')].map((one) => one.className.baseVal)"
        self.assertEqual(self.ask(arrows), ["arrow", "arrow waits"])
        ends = "[...document.querySelectorAll('.arrow')].map((one) => one.getAttribute('y2'))"
        self.assertEqual(self.ask(ends), [str(rank * failure_part.ROW + failure_part.ROW / 2) for rank in (3, 2)])
        box = "document.querySelector('#test-2').getBoundingClientRect().top + scrollY < 1200"
        self.assertTrue(self.ask(box), "the first failure hides the list")
        self.assertEqual(self.browser.complaints(), [])

    def test_lanes_of_many_ranks(self):
        self.open((hang_of_ranks(512),))
        names = self.ask("[...document.querySelectorAll('#test-1 .lanes div')].map((one) => one.textContent)")
        self.assertEqual(names, ["rank 0", "rank 1", "rank 2", "rank 3"])
        self.assertIn("4 of 512 ranks", self.ask("document.querySelector('#test-1').textContent"))

    def test_sorting(self):
        times = {"test_slow": (9.0, 3.0), "test_fast": (0.5, 1.0), "test_middle": (1.5, 2.0), "test_10": (1.0, 5.0)}
        times["test_9"] = (1.0, 4.0)
        finished = tuple(FinishedTest((attempt(n, seconds=s, began=b),)) for n, (s, b) in times.items())
        self.open((*finished, FinishedTest((attempt("test_bad", TestOutcome.FAILED, seconds=0.1, began=6.0),))))
        names = "[...document.querySelectorAll('.test .name b')].map((name) => name.textContent.slice(5))"
        by_seconds = ["slow", "middle", "10", "9", "fast", "bad"]
        self.assertEqual(self.ask(names), ["bad", *by_seconds[:-1]])
        self.assertEqual(self.ask("document.getElementById('sort').value"), "rank")
        for key, expected in (
            ("seconds", by_seconds),
            ("began", ["fast", "middle", "slow", "9", "10", "bad"]),
            ("name", ["9", "10", "bad", "fast", "middle", "slow"]),
            ("rank", ["bad", *by_seconds[:-1]]),
        ):
            self.ask(f"sort.value = '{key}'; sort.dispatchEvent(new Event('change')); null")
            with self.subTest(key=key):
                self.assertEqual(self.ask(names), expected)
        self.search("test_fast")
        self.assertEqual(len(self.ask(VISIBLE)), 1)

    def test_nothing_is_wider_than_a_narrow_window(self):
        long = "x" * 300
        device = "MIG-12345678-1234-1234-1234-123456789012"
        logs = {"message": f"{long}\nmore", "output": long, "ranks": ranks([long], long), "leftovers": (long,)}
        finished = (
            hang_of_ranks(4),
            finished_in_world(8),
            *every_outcome(),
            FinishedTest((attempt(f"test_{long}", TestOutcome.UNEXPECTED_SUCCESS, seconds=7300.0, **logs),)),
            FinishedTest((attempt("test_s", TestOutcome.SKIPPED, message=long),)),
        )
        header = RunHeader(f"python run_test.py {long}", "f" * 40, True, long, "2.13.0", "3.11.4", f"1: {device}")
        self.addCleanup(self.browser.resize, 1280)
        for width in 400, 320:
            self.browser.resize(width)
            self.open(finished, header=header, devices=(device,), warnings=(long,), repetitions=2)
            for opened in "true", "false":
                self.ask(f"document.querySelectorAll('details').forEach((one) => one.open = {opened})")
                with self.subTest(width=width, opened=opened):
                    self.assertEqual(self.ask("[innerWidth, document.documentElement.scrollWidth]"), [width, width])
                    beyond = """[...document.querySelectorAll('main *')].filter(
                        (one) => one.getBoundingClientRect().right > innerWidth && !one.closest('.scroll')
                    ).map((one) => one.tagName + '.' + one.className)"""
                    self.assertEqual(self.ask(beyond), [])
            self.assertGreater(self.ask("document.querySelector('svg').getBoundingClientRect().width"), width / 3)

    def test_every_text_has_contrast(self):
        header = RunHeader("python run_test.py", "f" * 40, False, "node", "2.13.0", "3.11.4", "none")
        self.open((hang_of_ranks(4), finished_in_world(8), *every_outcome()), header=header, warnings=("careful",))
        for scheme in "light", "dark":
            self.browser.scheme(scheme)
            for opened in "true", "false":
                self.ask(f"document.querySelectorAll('details').forEach((one) => one.open = {opened})")
                worst, *others = self.ask(CONTRASTS)
                with self.subTest(scheme=scheme, opened=opened):
                    self.assertGreater(len(others), 40)
                    self.assertGreaterEqual(worst[0], 4.5, worst)

    def test_every_control_has_a_name(self):
        self.open(every_outcome())
        unnamed = """[...document.querySelectorAll('button, input, select, summary, svg a')].filter((one) =>
            !one.textContent.trim() && !one.ariaLabel && !(one.labels && one.labels.length)).length"""
        self.assertEqual(self.ask(unnamed), 0)
        self.assertEqual(self.ask("document.querySelectorAll('h1').length"), 1)

    def test_light_and_dark(self):
        self.open(every_outcome())
        colours = []
        for scheme in "light", "dark":
            self.browser.scheme(scheme)
            colours.append(self.ask("getComputedStyle(document.body).backgroundColor"))
        self.ask("document.getElementById('theme').click()")
        colours.append(self.ask("getComputedStyle(document.body).backgroundColor"))
        self.assertNotEqual(colours[0], colours[1])
        self.assertEqual(colours[0], colours[2])

    def test_output_of_tests_is_escaped(self):
        bad = (
            "</pre></script><script>window.broken = 1</script><img src=x onerror='window.broken = 1'>\x00\x1b[31m\udc80"
        )
        name = "test_<b>bold</b>\x00\udc80"
        self.open((FinishedTest((attempt(name, TestOutcome.FAILED, message=bad, output=bad, ranks=ranks([bad])),)),))
        self.assertIsNone(self.ask("window.broken"))
        self.assertIn("</script><script>window.broken", self.ask("document.querySelector('pre.message').textContent"))
        self.assertEqual(self.ask("document.querySelector('.name b').textContent"), printable(name))
        self.assertEqual(self.browser.complaints(), [])


class TextTest(unittest.TestCase):
    def test_nothing_refers_outside_the_page(self):
        page = html_page.render_page(history_of(every_outcome()))
        self.assertEqual(re.findall(r"(?:https?:)?//[a-z]\S*", page), [])
        self.assertEqual(set(re.findall(r'(?:src|href)="([^#"]*)', page)), {"", "data:,"})

    def test_failures_come_first_then_unclean_passes(self):
        page = html_page.render_page(history_of(every_outcome()))
        outcomes = re.findall(r'class="test ([a-z-]+)"', page)
        self.assertEqual(outcomes[0], "failed")
        self.assertEqual(outcomes[-3:], ["passed", "skipped", "skipped"])

    def test_failures_of_ranks_come_before_those_of_files(self):
        def one(file, cls="", method="", world_size=1, seconds=0.0, logs=()):
            test = Test(TestId(file, cls, method), world_size=world_size)
            return FinishedTest((make_attempt(test, TestOutcome.ERROR, "why", seconds, ranks=logs),))

        finished = (
            one("test_import.py", seconds=100.0),
            one("test_x.py", "T", "test_alone", seconds=50.0),
            one("test_x.py", "T"),
            one("test_x.py", "T", "test_fast_ranks", 2),
            one("test_x.py", "T", "test_slow_ranks", 2, seconds=3.0),
            one("test_x.py", "T", "test_with_logs", logs=ranks(["x"]), seconds=1.0),
        )
        page = html_page.render_page(history_of(finished))
        names = [re.sub("<.*?>", "", name) for name in re.findall('<span class="name">(.*?)</span>', page)]
        expected = ["T::test_slow_ranks", "T::test_with_logs", "T::test_fast_ranks", "T::test_alone", "T"]
        self.assertEqual(names, [*(f"test_x.py::{name}" for name in expected), "test_import.py"])
        self.assertEqual(re.findall(r'id="(test-\d+)"[^>]* open', page), ["test-1"])

    def test_the_header(self):
        header = RunHeader("run <this>", "abc", True, "node7", "2.13.0", "3.11.4", "1 cuda device: 0")
        page = html_page.render_page(history_of(every_outcome(), header=header))
        rows = dict(re.findall(r"<dt>(.*?)</dt><dd>(.*?)</dd>", page))
        self.assertEqual(
            rows,
            {
                "command": "run &lt;this&gt;",
                "commit": "abc (with uncommitted changes)",
                "host": "node7",
                "torch": "2.13.0",
                "Python": "3.11.4",
                "devices": "1 cuda device: 0",
            },
        )
        self.assertNotIn("<dt>", html_page.render_page(history_of(every_outcome())))

    def test_the_difference_from_a_budget_stands_above_the_lanes(self):
        """All of it: a screen has room for a few lines."""
        (attempt_of_hang,) = hang_of_ranks(4).attempts
        values = tuple(Value(f"  {number} at test_x.py:{number}, in layer.{number}") for number in range(24))
        failure = replace(attempt_of_hang.failure, values=values)
        page = html_page.render_page(
            history_of([FinishedTest((replace(attempt_of_hang, end=replace(attempt_of_hang.end, failure=failure)),))])
        )
        shown = [page.index(value.text) for value in values]
        self.assertEqual(shown, sorted(shown))
        self.assertLess(shown[-1], page.index('class="lanes"'))
        self.assertNotIn(values[-1].text, failure.screen)

    def test_the_traffic_of_a_whole_world(self):
        page = html_page.render_page(history_of([finished_in_world(8)]))
        self.assertIn("whole world of 8 ranks in 2 classes", page)
        self.assertIn("<li>test_x.py:9 in test_b</li>", page)
        table = re.search(r'<table class="traffic">(.*?)</table>', page)[1]
        self.assertIn("<caption>KiB that the ranks of a row send to those of a column</caption>", table)
        self.assertEqual(re.findall(r'<th scope="col">(.*?)</th>', table), ["0-1", "2-3", "4-5", "6-7"])
        first, *others = re.findall(r'<tr><th scope="row">(.*?)</th>(.*?)</tr>', table)
        self.assertEqual(re.findall(r"<td[^>]*>(.*?)</td>", first[1]), ["", "2", "2", "1"])
        self.assertEqual([number for number, _ in others], ["2-3", "4-5", "6-7"])

    def test_headlines(self):
        good, bad = FinishedTest((attempt("test_a"),)), FinishedTest((attempt("test_b", TestOutcome.CRASHED),))
        flaky = every_outcome()[7:8]
        self.assertEqual(html_page.headline(history_of((good, bad)).summary), "1 of 2 tests failed")
        self.assertEqual(html_page.headline(history_of((good,)).summary), "1 test passed")
        self.assertEqual(html_page.headline(history_of(()).summary), "No test passed or failed")
        self.assertEqual(html_page.headline(history_of(flaky, Policy(fail_flaky=True)).summary), "1 of 1 test failed")

    def test_long_logs_are_cut_and_say_so(self):
        long = "x" * 20_000_000
        page = html_page.render_page(
            history_of((FinishedTest((attempt("test_long", output=long, ranks=ranks([long, long])),)),))
        )
        self.assertLess(len(page), 1_000_000)
        self.assertEqual(page.count("characters cut here"), 3)

    def test_ticks_are_round_and_few(self):
        self.assertEqual([timeline.tick_step(length) for length in (0.4, 8, 9, 59, 3600)], [0.05, 1, 2, 10, 500])

    def test_every_attempt_has_its_bars(self):
        svg = timeline.render_timeline(history_of(every_outcome()), {})
        bars = [one for one in svg.iter("rect") if one.get("class", "").startswith("bar")]
        ran = [each for one in every_outcome() for each in one.attempts]
        self.assertEqual(len(bars), sum(len(one.lease.slots) for one in ran))
        ET.tostring(svg)


if __name__ == "__main__":
    unittest.main()

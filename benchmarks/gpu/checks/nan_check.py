"""A NaN is reported at the collective that brings it, by a test that asks for that."""

from runs import run_test

ORDER = 48
LIMIT = 15


def check(c):
    found = run_test(c, "test_nan.py", "--timeout=30")
    message = found.message("test_nan")
    got = found.outcomes.get("test_nan")
    c.expect(got in ("failed", "error", "crashed"), "a NaN in a collective fails the test", f"{got}: {message[:600]}")
    c.expect("nan" in message.lower(), "the message says that it is a NaN", message[:600])
    c.expect("all_reduce" in message.lower(), "the message names the collective", message[:1500])
    for name in ("test_no_nan", "test_nan_unchecked"):
        c.expect(found.outcomes.get(name) == "passed", f"{name} passes", found.message(name)[:600])
    c.note(message[:1200])


def on_cpu(c):
    check(c)

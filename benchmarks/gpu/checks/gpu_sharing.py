"""--gpu-sharing runs several small units on one GPU at once, by the memory that they have needed before."""

from runs import run_test

ORDER = 70
LIMIT = 70
QUICK_LIMIT = 60


def check(c):
    names = "test_sharing.py"
    first = run_test(c, names, "--gpus=1", name="learn")
    c.expect(first.code == 0, "the tests pass one after the other", first.failures)
    c.expect(_overlaps(first) == 0, "without the option, no two tests are on the GPU at once", _overlaps(first))
    peaks = {name: one["attempts"][-1]["device_memory"] for name, one in first.tests.items()}
    c.expect(all(peaks.values()), "each test has a peak", peaks)
    c.figure("peak of a test", max(one["reserved"] for one in peaks.values() if one) / 2**20, "MiB")
    shared = run_test(c, names, "--gpus=1", "--gpu-sharing", name="shared")
    c.expect(shared.code == 0, "the tests pass side by side", shared.failures)
    c.expect(_overlaps(shared) > 0, "tests are on the GPU at the same time", shared.document.get("seconds"))
    c.figure("one by one", first.document.get("seconds"), "s")
    c.figure("side by side", shared.document.get("seconds"), "s")


def _overlaps(found):
    """Pairs of tests that were on the GPU at the same time."""
    spans = [(one["attempts"][-1]["began"], one["attempts"][-1]["seconds"]) for one in found.tests.values()]
    pairs = ((a, b) for a in range(len(spans)) for b in range(a))
    return sum(spans[a][0] < sum(spans[b]) and spans[b][0] < sum(spans[a]) for a, b in pairs)

"""The files of the corpus are no tests of ours: `benchmarks/conformance.py` runs them, on both sides."""

collect_ignore_glob = ["corpus/*"]

"""The fixture project's tests fail on purpose: run_test.py runs them, and what comes of it is held against a model."""

collect_ignore_glob = ["project/*"]

"""The tests of the fixture project fail on purpose: run_test.py runs them, and test_project.py checks the results."""

collect_ignore_glob = ["project/*"]

"""The tests of the fixture projects fail on purpose: run_test.py runs them, and test_project.py and test_one_screen.py
check the results."""

collect_ignore_glob = ["project/*", "day/*"]

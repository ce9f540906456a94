"""Helpers for our own tests: each module is one subject. Each folder of tests has a link to this folder.

| module | contents |
| --- | --- |
| `outcomes` | `outcome_of`: runs one unittest test case, and tells its outcome |
| `ranks` | `Ranks`, `OneRank`, `OnCpu`: bases of what runs in ranks; `ranks_told`: the values that their ranks send |
| `processes` | `run_python`, `start_python`; `is_alive`, `wait_until_gone`, `heed_ctrl_c` |
| `warm` | `run_warm`, `start_run`: programs, and preloaded servers of runs, as forks of a process with torch |
| `files` | `write`: a source in a folder; `subject`: the source of a test's subject, beside the test |
| `terminals` | `Terminal`: a program on a terminal of its own, and what it shows |
| `walkthrough` | `Walkthrough`: a reader who writes the files of a page and types its commands |
| `settings` | another time-out, another environment |
| `leftovers` | `nothing_left`: no process, file or descriptor more than before |
| `pytest_runs` | `run_pytest`, `run_under_torchrun`: runs of pytest with our plugin, and their outcomes |
| `project` | `Project`: a folder with test files that run in forks of one preloaded server |
| `runs` | `run_test`, `RunsCase`: runs of run_test.py in a folder, as processes |
| `agents` | `Nodes`: runs over agents on pretended nodes |
| `slurm` | `SmallSlurm`: a Slurm of its own |
| `invented` | tests and units that do not exist |
| `invented_runs` | the events of runs that did not happen, for the reports |
| `verdicts` | reports of ranks with every ending |
| `rank_faults` | what ranks do that every host of ranks must report alike: raise, skip alone, exit, die, hang |
| `planted_ranks` | ranks of every kind in which a fault is planted, and what is said about it |
| `found_bugs` | the bugs of docs/found, and the versions of torch that have them |
| `import_forms` | a file with every form of import of PyTorch's kit |
| `faults` | suites with a fault in every rank |
| `nvml` | machines with GPUs that do not exist |
| `with_accelerators` | tests on a machine with accelerators of Python, of which torch knows all but how to compute |
| `checkout` | `CheckoutCase`: a fake PyTorch checkout |
| `junit`, `browser` | readers of the reports: the schema of JUnit files, a headless Chromium |
| `drawing` | random cases of fixed seeds, for tests of pure code |
| `sources` | which module of the package imports which, names and docstrings |
| `story` | records the functions that run in all processes, from a fault to its message |
| `names_in_text` | names of the package's modules in strings and other text, and which of them do not exist |
"""

"""Every private name of pytest that we use, behind one that says what we use it for. Imports no torch.

Versions 7.4 to 9.2 have each of them, unless its function names fewer. `test_internals.py` tries all with the version
that is installed. Others may take each module.

    configuration    options, settings and plugins of a run, and its end
    collected_files  paths with odd names, and the collectors of files
    item_fixtures    fixtures of a test
    item_state       what pytest knows of a test
    failure_texts    texts of failures, and --pdb
    captured_output  captured output, logs and the terminal
"""

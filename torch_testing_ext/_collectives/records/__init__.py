"""The collectives that ranks have issued, whatever recorded them.

Others take both modules. Neither imports torch.

    issued_calls  calls, groups and records as the rules read them
    raw_records   what a rank leaves at the end of a test
"""

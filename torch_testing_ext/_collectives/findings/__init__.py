"""Findings: the rules that compare the calls of all ranks.

All modules are pure: records in, findings out. Others may take each of them.

    finding            what a finding is
    mismatches         ranks that disagree
    deadlocks          ranks that wait for each other
    abandoned_calls    ranks that have ended without a call
    uneven_calls       calls that not all have issued
    other_members      groups of other members
    message_pairs      sends with their receives
    opposite_orders    orders that happened to pass
    unbuffered_sends   sends that happened to be buffered
    diverged_replicas  tensors that should be alike
    sanitizer_reports  what the sanitizer saw in one rank
"""

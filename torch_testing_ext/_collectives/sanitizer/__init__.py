"""The sanitizer of a rank, which logs and checks each operation before it is issued.

The parent takes `sanitizer_kinds`, `sanitizer_log` and `result_checks`; a rank begins with `rank_sanitizer`, or with
`thread_waits` if it is a thread.

    sanitizer_kinds   the kinds of checks, and how they are chosen
    rank_sanitizer    its begin and its end in a rank
    call_recorder     hears of each operation
    issued_call       the note of one operation
    sanitizer_log     the log, which the parent reads
    operation_checks  checks of an operation's tensors
    flying_buffers    buffers of work in flight
    watched_works     works that are not waited for
    thread_waits      the same for ranks that are threads
    replica_check     digests of tensors that should be alike
    result_samples    samples of inputs and outputs
    result_checks     outputs that the inputs do not give
    faults_of_rank    planned faults, which happen at a call
"""

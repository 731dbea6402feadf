"""The laboratory: measure, gate, score, tune and profile attention kernels; ``python -m bench --help`` lists commands.

A command is a module (`measure`, `gate`, `score`, `references`, `tune`, `ncu`, `plot`, `overhead`, `evidence`,
`tables`) with SUMMARY, add_arguments and run. Beneath them, from the bottom up:

    arguments           what options accept; bad usage exits with 3
    report, machine     tables, JSON, resumable results; where a figure was taken
    device, memory      the CPU or GPU 0; arrays between guard zones, as any library sees them
    problems, operands  cases from tests/cases.py; the arrays of one call, filled, hashed and judged by float64
    contender, peers    kernels, candidates and other libraries behind one interface: operands -> thunk
    timer, rounds       host clock, events or graph replay; contenders take turns in random order
    stats, conditions   log-ratios, block bootstrap, verdict; do the times bear it out, or was the machine busy
    trials              correctness with fresh seeds and pointers
    processes, shared   what Linux offers to hold a process; memory that two processes see, and one of them writes
    isolation           a worker process with a time limit, which stands still when it is not its turn
    pool, contestant    the memory of timed calls, on the judge's side; what calls the candidate, on the worker's
    duel                a candidate against baselines: what the judge alone knows, measures and concludes
    spaces, variants,
    objective, search   what the tuner varies, builds, evaluates and minimises, and kernel_tuner's strategies over it

Nothing here is imported by ``fa_ext``, and heavy dependencies are imported where they are used.
"""

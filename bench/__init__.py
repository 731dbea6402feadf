"""The laboratory: measure, gate, score, tune and profile attention kernels; ``python -m bench --help`` lists commands.

From the bottom up:

    arguments, report   what options accept, bad usage exits with 3; tables, JSON, resumable results
    machine/            where a figure was taken: the machine, its CPU and GPU 0, how the library was built
    problems/           cases, their grids and presets; the arrays of one call of each operation, between guard
                        zones, as any library sees them, filled, hashed and judged by float64
    implementations/    kernels, candidates and other libraries behind one interface: operands -> thunk
    timing/             host clock, events or graph replay; rounds in random order; log-ratios, block bootstrap,
                        verdict; do the times bear it out, or was the machine busy; what the machine can reach
    trial/              a candidate against baselines: a worker process with a time limit, which stands still while another one
                        runs; memory that two processes see and one of them writes; correctness with fresh seeds and pointers; what
                        the judge alone knows, measures and concludes
    load/               streams kept busy beside other work, and the watchdog outside
    tuning/             what the tuner varies, builds, evaluates and minimises, strategies over it, the profiler
    recording/          the evidence record, and the test suites whose outcome goes into it
    commands/           measure, gate, score, references, audit, tune, plot, overhead, soak, chaos, evidence, tables: each a module with
                        SUMMARY, add_arguments and run
    evidence/, examples/  the records; programs to start from

Nothing here is imported by ``fa_ext``, and heavy dependencies are imported where they are used.
"""

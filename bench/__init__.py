"""The laboratory: measure, gate, score, tune and profile attention kernels; ``python -m bench --help`` lists commands.

Nothing here is imported by ``fa_ext``, and heavy dependencies are imported where they are used.
"""

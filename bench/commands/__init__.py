"""Each command of ``python -m bench``, a module with ``SUMMARY``, ``add_arguments`` and ``run``."""

"""A candidate in a process of its own, judged and timed from outside."""

"""Page faults of a process that makes and drops arrays, for the test of what workers do with freed memory."""

import resource

import numpy as np


def of_arrays(calls, arrays, nbytes, tell):
    """Minor page faults of `calls` times making `arrays` arrays of `nbytes` each, filled, and dropping them."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(calls):
        [np.ones(nbytes, np.uint8) for _ in range(arrays)]
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

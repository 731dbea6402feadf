"""Implementations that can be timed: kernels of this library, candidates by name, peers of other projects."""

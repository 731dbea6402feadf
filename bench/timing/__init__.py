"""Clocks, rounds, statistics, and the conditions under which a time counts."""

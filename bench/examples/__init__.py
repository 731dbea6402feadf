"""Candidates to start from."""

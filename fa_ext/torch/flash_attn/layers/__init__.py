"""Layers of FlashAttention that its users import beside its functions."""

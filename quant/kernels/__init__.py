"""Kernels that torch does not have."""

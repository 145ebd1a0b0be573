"""Triton kernels, one file per operation; installed as `drq_fast.kernels`. They import nothing from drq_fast."""

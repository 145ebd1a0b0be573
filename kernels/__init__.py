"""Triton kernels, one file per operation; installed as `drq_fast.kernels`, and importing nothing from drq_fast."""

"""Triton kernels: one file per family, each held to plain torch by tests that run in Triton's interpreter.

Only code that `present.usable` has let through may import the files with kernels: without a GPU there need be no
Triton, and on a CPU nothing here is ever loaded. `variant` says what a kernel is compiled for ahead of time.
"""

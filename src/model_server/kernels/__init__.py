"""Triton kernels, tested against plain torch; imported only after `availability.usable`.

`variant` says what a kernel is compiled for ahead of time.
"""

"""Operators in C++ for CPUs, built when the package is installed; where none can be used torch's own are."""

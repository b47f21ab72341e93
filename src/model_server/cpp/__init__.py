"""Operators in C++ for CPUs, built at installation; torch's own are used elsewhere."""

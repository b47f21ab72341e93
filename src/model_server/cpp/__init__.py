"""Operators in C++ for CPUs, compiled once on the machine they run on; without a compiler torch's own are used."""

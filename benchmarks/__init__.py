"""Benchmarks that anyone can rerun; each prints a table and writes one JSON file under `benchmarks/out/`."""

"""The stages that measure Tercet on a CUDA device, and prove it right there: see README.md beside this file."""

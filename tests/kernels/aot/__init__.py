"""Compiles every variant of every kernel for GPUs that are not there, and reports what the assembler says of each."""

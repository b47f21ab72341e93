"""The log: records that one process writes and another repeats, and progress bars."""

"""Finding checkpoint files and reading just the rows that a rank needs."""

"""How it is measured, and what it is a share of."""

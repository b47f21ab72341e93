"""A bounded process for work that clients could make endless."""

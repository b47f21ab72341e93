"""Words of other servers' command lines, and what they are here; one table for the parser and for the documents."""

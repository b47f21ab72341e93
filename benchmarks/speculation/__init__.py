"""What drafts gain, and what they cost where they gain nothing."""

"""What drafts tokens, as launcher and model server must agree on it."""

"""From logits to the next token of each request, independent of other rows."""

"""From logits to the next token of each request, independent of the other rows of the batch."""

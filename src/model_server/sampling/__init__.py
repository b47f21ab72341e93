"""From logits to the next token of each request, independent of its neighbours in the batch."""

"""Control plane: HTTP, validation, queue and batches. Decides which request runs next; never imports torch."""

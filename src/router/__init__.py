"""Control plane: HTTP, validation, queue and batches. Decides who runs next; never imports torch."""

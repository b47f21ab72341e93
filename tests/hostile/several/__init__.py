"""Several models behind one address: random load with keys, priorities and batches, while models come, go and are
killed."""

"""What launcher, download step and shard decide alike of quantized weights: what is served, and what is refused."""

"""The building blocks of decoders, tensor-parallel where the weights are split."""

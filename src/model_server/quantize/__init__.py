"""`model-server quantize`: rounds matrices by GPTQ (arXiv 2210.17323) to 4 or 8 bits."""

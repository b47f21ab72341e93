"""`model-server quantize`: a checkpoint whose matrices GPTQ (arXiv 2210.17323) has rounded to 4 or 8 bits."""

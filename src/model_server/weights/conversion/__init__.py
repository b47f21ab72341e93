"""Files in older formats made into safetensors and tokenizer.json, in processes of their own."""

"""GGUF files, llama.cpp's: what they hold, under the names and in the order of rows that transformers uses."""

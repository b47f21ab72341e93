"""Between token ids and text: tokenizer, incremental detokenizer, stop decisions."""

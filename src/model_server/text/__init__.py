"""Between ids and text: tokenizer, detokenizer, stops."""

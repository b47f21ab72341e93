"""Everything that makes the demo model: corpus, tokenizer, template, training. Only the result ships in the package."""

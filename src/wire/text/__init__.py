"""Others' text: shown safely, tokenized safely."""

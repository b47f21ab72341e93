"""The kinds of a step: prompts beside decodes, decodes alone, and those that a feature makes in their place."""

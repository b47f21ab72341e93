"""The kinds of a step: prompts beside decodes, decodes alone, and decodes that check drafts."""

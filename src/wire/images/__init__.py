"""Images in prompts: which models read them, what stands for one in a prompt, and what their towers are given."""

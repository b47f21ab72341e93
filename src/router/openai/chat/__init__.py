"""The OpenAI chat dialect on top of generation: template, prompt, chunks. Pure; knows no HTTP."""

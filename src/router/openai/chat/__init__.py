"""OpenAI's chat API on top of generation: template, prompt, chunks. Pure; knows no HTTP."""

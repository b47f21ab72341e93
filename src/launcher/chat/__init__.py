"""`launcher chat`: a conversation in a terminal or a pipe, with any server that speaks OpenAI's chat API."""

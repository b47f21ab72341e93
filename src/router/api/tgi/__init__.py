"""TGI's own routes: `/generate`, `/generate_stream`, `/`, `/tokenize`, `/chat_tokenize`."""

"""`launcher bench`: a load generator for any server with TGI's API or OpenAI's; it knows nothing else of our server."""

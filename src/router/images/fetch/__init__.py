"""Images from clients' URLs, of allowed hosts only."""

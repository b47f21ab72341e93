"""How the model servers of upstream TGI read images: they are sent the files, and count tokens in ways of their own."""

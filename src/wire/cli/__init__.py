"""An option: its declaration, its help page, and the commands that are made of options."""

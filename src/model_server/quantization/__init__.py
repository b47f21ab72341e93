"""How weights are stored: forms in memory, and file formats read into them."""

"""How weights are stored: the forms that a matrix has in memory, and the file formats that are read into them."""

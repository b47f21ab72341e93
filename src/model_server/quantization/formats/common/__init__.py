"""What formats have in common: words of codes, groups, cuts, the scales of blocks, and what configs say of modules."""

"""A group of nodes: the launcher of node 0 leads, the others do what it plans; each notices when another is lost."""

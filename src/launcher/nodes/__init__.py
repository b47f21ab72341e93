"""A group of nodes: node 0's launcher leads; each notices when another is lost."""

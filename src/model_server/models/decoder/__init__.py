"""Our own decoder: its blocks, their parts, and how they are built from a `Spec`."""

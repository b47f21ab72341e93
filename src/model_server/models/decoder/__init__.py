"""Our decoder: blocks, parts, and how they follow from a `Spec`."""

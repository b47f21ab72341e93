"""What a step of the engine costs in this process, and beside another configuration."""

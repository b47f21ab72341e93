"""Text that others wrote: how it is shown, and what the library that cuts it into tokens may do."""

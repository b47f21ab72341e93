"""How text that others wrote is shown."""

"""Charts as SVG text: no library in the base install draws one."""

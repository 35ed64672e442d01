"""Pictures of a Program: a text grid, SVG frames, an HTML page, and a cost plot."""

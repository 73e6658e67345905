"""Command-line experiments: options, methods, data and output folders."""

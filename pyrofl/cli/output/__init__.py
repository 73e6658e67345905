"""Output of the command line: method cards, comparison tables and report sections."""

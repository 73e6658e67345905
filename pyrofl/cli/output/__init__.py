"""Output of the commands: method cards, comparison tables and report sections."""

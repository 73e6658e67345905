"""Output of the commands: cards of methods, comparisons and sections of a report."""

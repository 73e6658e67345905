"""What the commands show: cards of methods, comparisons and sections of a report."""

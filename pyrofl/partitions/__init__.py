"""Who holds which rows: partitions of a data set over clients, and federations made by them."""

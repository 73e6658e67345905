"""Partitions of a data set among clients, and federations built from them."""

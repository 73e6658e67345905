"""Columns of tables: reading, checking, summarizing and preprocessing them."""

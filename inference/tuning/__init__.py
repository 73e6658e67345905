"""Search for settings of a method on rows held back."""

"""The verbs: how a method is run. Knows no method."""

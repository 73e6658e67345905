"""What several papers use."""

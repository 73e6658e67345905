"""What a server makes of messages."""

"""Rewrites of phases that change no number and save time."""

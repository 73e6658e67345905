"""Atomic writing of files: run folders, checkpoints and locks."""

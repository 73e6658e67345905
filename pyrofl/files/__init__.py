"""Files written atomically: folders of runs, checkpoints and locks."""

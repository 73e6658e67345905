"""Files that are whole or absent: folders of runs, and what a run goes on from."""

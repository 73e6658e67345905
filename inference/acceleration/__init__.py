"""Acceleration of local training: clients in groups by size, recorded updates, space of rows.

`local.run_phases` has the results of `training.phases.run_phases`, up to rounding, in less time. It
is registered as the extension "executor"; without this folder, training runs as written.
"""

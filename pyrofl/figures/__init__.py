"""Figures: every function returns a new matplotlib Figure without opening a window.

Those of one panel draw in `ax=` instead, if they are given axes.
"""
# ruff: noqa: F403

from pyrofl.figures.checks import *
from pyrofl.figures.diagrams import *
from pyrofl.figures.flows import *
from pyrofl.figures.motion import *
from pyrofl.figures.posteriors import *
from pyrofl.figures.runs import *
from pyrofl.figures.sites import *

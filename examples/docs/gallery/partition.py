"""Ten clients receive shares of each class from a Dirichlet distribution here."""

from pyrofl import datasets, federations, figures

digits = datasets.load("digits")
data = federations.split(digits, "dirichlet:0.3", clients=10)
counts = federations.class_counts(data)
figure = figures.partition(counts, data.names, data.classes)

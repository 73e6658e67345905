"""Successive halving on validation rows: settings are removed while the rounds increase."""

from pyrofl import figures

ends = {"lr=0.01": 0.7, "lr=0.03": 0.8, "lr=0.1": 0.82, "lr=0.3": 0.6}
rows = []
for rounds, alive in ((6, ends), (18, ["lr=0.03", "lr=0.1"])):
    for name in alive:
        score = ends[name] * (1 - 0.5 / rounds)
        row = {
            "setting": name,
            "rounds": rounds,
            "score": score,
            "chosen": "yes" * (name == "lr=0.1"),
        }
        rows.append(row)
figure = figures.tuning(rows, "accuracy")

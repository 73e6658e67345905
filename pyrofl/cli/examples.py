"""What the help of each command gives to try."""

from __future__ import annotations

EXAMPLES = {
    "list": "pyrofl list\npyrofl list methods",
    "explain": "pyrofl explain pfedvem",
    "run": "pyrofl run pfedvem --test labels_global --rounds 12 --set lr_head=0.01 lr_base=0.01\n"
    "pyrofl run fedavg --data csv:heart.csv --target sick --group hospital --missing fill",
    "compare": "pyrofl compare local fedavg pfedvem --seeds 3 --out results\n"
    "pyrofl compare local fedavg --set fedavg.fine_tune=2 --out cmp",
    "tune": "pyrofl tune fedavg --over lr=0.01,0.03,0.1 --rounds 18 --out tuned",
    "partition": "pyrofl partition --partition dirichlet:0.3 --clients 10 --out who.png",
    "predict": "pyrofl predict runs/fedavg-0 --data new.csv --client hospital_3 --out p.csv",
    "answer": "pyrofl answer results",
    "report": "pyrofl report results",
}
FIRST = """three commands to try:
  pyrofl list
  pyrofl explain pfedvem
  pyrofl compare local fedavg pfedvem --rounds 5 --seeds 2 --out results"""

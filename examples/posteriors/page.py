"""Page and figure of the benchmark's results."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from statistics import median

from methods import METHODS
from metrics import MAX_SHIFT, Reference
from problems import HERE, NAMES, load

from pyrofl import figures
from pyrofl.figures.style import panels, styles, with_legend
from pyrofl.files.text_tables import markdown

Row = Mapping[str, str]

VERDICTS = (
    "accurate",
    "accurate, warned",
    "inaccurate, warned",
    "inaccurate, silent",
    "failed",
    "stopped",
    "not applicable",
)


def verdict(row: Row) -> str:
    """Return the verdict of a result, and whether anything has warned."""
    if row["verdict"] == "accurate":
        return "accurate, warned" if row["warning"] else "accurate"
    if row["verdict"] == "inaccurate":
        return f"inaccurate, {'warned' if row['warning'] else 'silent'}"
    return row["verdict"]


def methods_of(rows: list[Row]) -> list[str]:
    """Return the methods of the results, those of the benchmark first."""
    found = {row["method"] for row in rows}
    return [n for n in METHODS if n in found] + sorted(found - METHODS.keys())


def summary(rows: list[Row]) -> str:
    """Return one line for each method: its verdicts, and the medians of what it costs."""
    lines = []
    for method in methods_of(rows):
        mine = [row for row in rows if row["method"] == method]
        counts = Counter(map(verdict, mine))
        cost = []
        for name, unit in (
            ("exchanges", 1),
            ("bytes_up", 1000),
            ("bytes_down", 1000),
            ("seconds", 1),
        ):
            known = [float(row[name]) / unit for row in mine if row[name] and row["shift"]]
            cost.append(f"{median(known):.3g}" if known else "-")
        lines.append([f"`{method}`", *(str(counts[v] or "-") for v in VERDICTS), *cost])
    head = ["method", *VERDICTS, "exchanges", "kB up", "kB down", "CPU s"]
    return markdown(head, lines)


def cell(row: Row | None) -> str:
    """Return a result in short."""
    if row is None:
        return ""
    if not row["shift"]:
        return "-" if row["verdict"] == "not applicable" else row["verdict"]
    text = f"{float(row['shift']):.2f}, {float(row['low']):.2f} to {float(row['high']):.2f}"
    text += "" if row["own"] == "compared" or not load(row["problem"]).own else " †"
    text = text if row["verdict"] == "accurate" else f"**{text}**"
    return text + "!" * bool(row["warning"])


def matrix(rows: list[Row]) -> str:
    """Return one line for each problem, and one column for each method."""
    found = {(row["problem"], row["method"]): row for row in rows}
    methods = methods_of(rows)
    lines = []
    for name in NAMES:
        problem = load(name)
        each = [cell(found.get((name, method))) for method in methods]
        if any(each):
            lines.append([name, f"{problem.responses}; {problem.partition}", *each])
    return markdown(["problem", "responses; partition", *(f"`{m}`" for m in methods)], lines)


def energies(rows: list[Row]) -> str:
    """Return the energy distances of all results that have one."""
    methods = methods_of(rows)
    found = {(row["problem"], row["method"]): row for row in rows if row["energy"]}
    lines = []
    for name in sorted({problem for problem, _ in found}):
        each = [found.get((name, method)) for method in methods]
        error = next(row["energy_error"] for row in each if row)
        numbers = (f"{float(row['energy']):.4f}" if row else "" for row in each)
        lines.append([name, f"{float(error):.4f}", *numbers])
    return markdown(["problem", "error", *(f"`{m}`" for m in methods)], lines)


def references() -> str:
    """Return one line for each reference."""
    lines = []
    for name in NAMES:
        if load(name).reference != name or not (HERE / "references" / f"{name}.json").exists():
            continue
        made = Reference.load(HERE / "references", name)
        far = max(one.mcse_mean / one.sd for one in made.statistics.values())
        wide = max(one.mcse_sd / one.sd for one in made.statistics.values())
        lines.append(
            [
                name,
                made.made_by,
                f"{made.diagnostic:.3f}",
                str(made.effective or "-"),
                f"{far:.3f}",
                f"{wide:.3f}",
            ]
        )
    head = ["problem", "made by", "diagnostic", "effective draws", "error of means", "error of sds"]
    return markdown(head, lines)


def reasons(rows: list[Row], *kinds: str) -> str:
    """Return a list of the results with some verdicts, with their values or reasons."""
    lines = []
    order = methods_of(rows)
    for row in sorted(rows, key=lambda row: (order.index(row["method"]), row["problem"])):
        if verdict(row) in kinds:
            more = row["warning"].replace("|", "/")
            if row["shift"]:
                shift = f"mean of {row['shift_at']} {float(row['shift']):.2f} sd"
                low, high = (f"{row[f'{n}_at']} {float(row[n]):.2f}" for n in ("low", "high"))
                more = f"{shift}, ratios of sds {low} to {high}. {more}".strip()
            lines.append(f"- `{row['method']}`, {row['problem']}: {more}")
    return "\n".join(lines) or "None."


def not_run(rows: list[Row]) -> str:
    """Return the problems without a result, for each method."""
    lines = []
    for method in dict.fromkeys([*METHODS, *(row["method"] for row in rows)]):
        done = {row["problem"] for row in rows if row["method"] == method}
        left = [name for name in NAMES if name not in done]
        if len(left) > len(NAMES) / 2:
            lines.append(f"- `{method}`: all{' except ' * bool(done)}{', '.join(sorted(done))}")
        elif left:
            lines.append(f"- `{method}`: {', '.join(left)}")
    return "\n".join(lines) or "None."


def write(rows: list[Row], path: Path) -> None:
    """Write the page: results of the default rounds and of the first seed."""
    main = [row for row in rows if not row["rounds"] and row["seed"] == rows[0]["seed"]]
    text = (HERE / "words.md").read_text()
    parts = {
        "SUMMARY": summary(main),
        "MATRIX": matrix(main),
        "ENERGIES": energies(main),
        "SILENT": reasons(main, "inaccurate, silent"),
        "WARNED": reasons(main, "inaccurate, warned"),
        "FAILED": reasons(main, "failed", "stopped"),
        "MISSING": not_run(main),
        "REFERENCES": references(),
    }
    for name, part in parts.items():
        text = text.replace(f"@{name}@", part)
    path.write_text(text)


def draw(rows: list[Row], path: Path) -> None:
    """Draw the largest error of a mean against the exchanges; lines join numbers of rounds."""
    shown = [row for row in rows if row["shift"] and row["exchanges"]]
    figure, (axes,) = panels(1, 1, 7.0, 4.5)
    looks = styles(methods_of(shown))
    for row in shown:
        mine = [one for one in shown if all(one[n] == row[n] for n in ("method", "problem"))]
        if row is mine[0]:
            points = sorted((float(v["exchanges"]), error_of(v)) for v in mine)
            look = looks[row["method"]] | {"ms": 4, "lw": 0.8, "alpha": 0.7}
            axes.plot(*zip(*points, strict=True), label=row["method"], **look)
    axes.axhline(MAX_SHIFT, color="gray", ls="--", lw=0.8, label=f"accurate below {MAX_SHIFT}")
    axes.set(xscale="log", yscale="log", xlabel="exchanges between server and clients")
    axes.set_ylabel("largest error of a mean (posterior sd)")
    title = "Largest error of the means of each problem, by exchanges"
    figures.save(with_legend(figure, [axes], looks, title=title), path)


def error_of(row: Row) -> float:
    """Return the largest error of a mean in posterior standard deviations, at least 0.01."""
    return max(abs(float(row["shift"])), 0.01)

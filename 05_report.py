"""The report: what stages 01 to 04 found, for every model in the results folder, beside what the post says.

    python 05_report.py --results results

It reads results/*/ and writes results/report.md with its figures beside it. What has not run, or cannot be read, is named.
"""
from pathlib import Path

import matplotlib
matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np

import gdn

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")      # Okabe and Ito (2008)
MARKERS = "osD^vPX"
plt.rcParams.update({"font.size": 11, "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True,
                     "grid.alpha": 0.25, "figure.constrained_layout.use": True, "savefig.dpi": 110})


# ---- reading: each stage's numbers, recomputed from what the file holds ---------------------------------------------

def spectrum(data):
    r = data["results"]
    found = {"effective_rank": np.array(r["effective_rank"], float), "spectrum": np.array(r["spectrum"], float),
             "layers": r["layers"], "state": r["state"],
             **{key: {int(k): np.array(v, float) for k, v in r[key].items()} for key in ("energy", "overlap")}}
    if found["effective_rank"].shape != found["spectrum"].shape[:2]:
        raise ValueError("shapes differ")
    return found


def decay(data):
    r = data["results"]
    return {"horizon": np.array(r["horizon"], float), "write_strength": np.array(r["write_strength"], float),
            "long": int(r["long_heads"]), "short": float(r["short_share"]), "heads": int(r["heads"])}


def changes(full, others):
    """{rank: (mean, standard error or None)} of the paired changes, the largest rank first."""
    pairs = {int(k): gdn.mean_se(np.subtract(v, full).tolist()) for k, v in others.items() if k != "full"}
    return {k: (pairs[k]["mean"], pairs[k]["se"]) for k in sorted(pairs, reverse=True)}


def loss(data):
    values = data["results"]["loss"]
    return {"full": float(np.mean(values["full"])), "n": len(values["full"]), "change": changes(values["full"], values),
            "state": data["results"]["state"]}


def ruler(data):
    samples = data["results"]["samples"]
    scores = {k: [float(s["scores"][k]) for s in samples] for k in samples[0]["scores"]}
    return {"full": float(np.mean(scores["full"])), "n": len(samples), "change": changes(scores["full"], scores),
            "task": data["arguments"]["task"], "length": int(data["arguments"]["length"])}


STAGES = {"01_spectrum.json": spectrum, "02_decay.json": decay, "03_loss.json": loss, "03_loss_bottom.json": loss,
          "03_loss_random.json": loss}


def read_model(folder):
    """{file name: its numbers with the arguments they were measured with}, and a list of what is missing or damaged."""
    found, problems = {}, []
    files = [folder / name for name in STAGES] + sorted(folder.glob("04_ruler/*.json"))
    for path in files:
        if not path.exists():
            if "loss_" not in path.name:
                problems.append(f"{path.stem} has not run")
            continue
        try:
            data = gdn.read_json(path)
            numbers = STAGES.get(path.name, ruler)(data)
            found[path.relative_to(folder).as_posix()] = {**numbers, "arguments": data["arguments"], "model": data["model"],
                                                          "environment": data["environment"], "timing": data["timing"]}
        except (KeyError, IndexError, TypeError, ValueError, AttributeError):
            problems.append(f"{path.relative_to(folder)} is damaged: delete it and run its stage again")
    if not any(name.startswith("04_ruler/") for name in found):
        problems.append("04_ruler has not run")
    return found, problems


# ---- the post's claims ---------------------------------------------------------------------------------------------------

def number(mean, se, digits):
    return f"{mean:+.{digits}f}" + ("" if se is None else f" ± {se:.{digits}f}")


def at_rank(found, rank, digits):
    if not found or rank not in found["change"]:
        return None
    return number(*found["change"][rank], digits)


def task_changes(model, task, lengths, ranks):
    """The changes measured on a task, in the post's lengths where they were run, else in those there are."""
    runs = [r for name, r in model.items() if name.startswith("04_ruler/") and r["task"] == task]
    runs = [r for r in runs if r["length"] in lengths] or runs
    cells = [f"{r['length']}: {r['full']:.0f}, " + ", ".join(f"rank {k} {number(*r['change'][k], 1)}" for k in ranks if k in r["change"])
             for r in runs if any(k in r["change"] for k in ranks)]
    return "; ".join(cells) or None, all(r["length"] in lengths for r in runs)


def horizon_and_rank(model):
    """Effective ranks of the heads with a horizon over 4,096 tokens."""
    if "01_spectrum.json" not in model or "02_decay.json" not in model:
        return None
    long = model["01_spectrum.json"]["effective_rank"][model["02_decay.json"]["horizon"] > 4096]
    return f"{long.min():.0f} to {long.max():.0f} ({len(long)} heads)" if len(long) else "no such head"


# (the claim, what the post says, the file it rests on, the figure measured here, what the post measured it on)
WEB = {"documents": "c4", "segment": 256}
CLAIMS = [
    ("heads with a decay horizon over 4,096 tokens", "48 of 288", "02_decay.json",
     lambda m: f"{m['02_decay.json']['long']} of {m['02_decay.json']['heads']}", WEB),
    ("heads that largely forget within 256 tokens", "61 %", "02_decay.json",
     lambda m: f"{100 * m['02_decay.json']['short']:.0f} %", WEB),
    ("effective rank of the heads with a long horizon", "30 to 47, of at most 128", "01_spectrum.json", horizon_and_rank, WEB),
    ("loss, 48 modes kept", "-0.0001 ± 0.0010 nats (8 documents)", "03_loss.json",
     lambda m: at_rank(m.get("03_loss.json"), 48, 4), {**WEB, "docs": 8}),
    ("loss, 12 modes kept", "+0.005 nats (8 documents)", "03_loss.json",
     lambda m: at_rank(m.get("03_loss.json"), 12, 4), {**WEB, "docs": 8}),
    ("multikey needles, 32 and 12 modes kept", "at baseline at 16K, 64K and 128K; no measurable decline at 12", "niah_multikey_2",
     (16384, 65536, 131072), (32, 12)),
    ("frequent words (fwe), 32 and 12 modes kept", "no noticeable decline", "fwe", (16384, 65536, 131072), (32, 12)),
    ("variable tracking (vt) at 64K, 12 to 32 modes kept", "+8 to +19 points, standard errors 3 to 5 (50 samples)", "vt",
     (65536,), (32, 24, 16, 12)),
    ("common words (cwe) at 64K, 32 modes kept", "27 points with the full state; -18 points (50 samples)", "cwe", (65536,), (32,)),
]


def claim_cell(model, claim):
    """What was measured here for a claim, and in what its scope differs from the post's."""
    source = claim[2]
    if source.endswith(".json"):
        if source not in model:
            return "not run"
        value, scope, run = claim[3](model), claim[4], model[source]
        differs = [f"{k} {run['arguments'].get(k)}" for k, v in scope.items() if run["arguments"].get(k) != v]
        if source != "03_loss.json" and run["arguments"].get("tokens") != 16384:
            differs.append(f"{run['arguments'].get('tokens')} tokens")
    else:
        value, same_length = task_changes(model, source, claim[3], claim[4])
        run = next((r for name, r in model.items() if name.startswith(f"04_ruler/{source}_")), None)
        if run is None:
            return "not run"
        differs = ([] if same_length else ["other lengths"]) + ([] if run["arguments"].get("segment") == 256 else
                                                                 [f"segment {run['arguments'].get('segment')}"])
    if value is None:
        return "not run at these ranks"
    if Path(run["model"]).name not in ("Qwen3.5-0.8B", "Qwen3.5-0.8B-Base"):
        differs = ["another model", *differs]
    return f"{value}<br>scope differs: {', '.join(differs)}" if differs else f"{value}<br>same scope"


# ---- figures ---------------------------------------------------------------------------------------------------------------

def panels(models, width=4.6, height=3.8):
    figure, axes = plt.subplots(1, len(models), figsize=(width * max(len(models), 1.35), height), sharey=True, squeeze=False)
    for ax, name in zip(axes[0], models):
        ax.set_title(name)
    return figure, list(zip(axes[0], models.items()))


def rank_axis(ax, ranks):
    ax.set_xscale("log", base=2)
    ax.invert_xaxis()
    ax.set_xticks(ranks, [str(r) for r in ranks])
    ax.minorticks_off()
    ax.set_xlabel("modes kept per head, r")


def draw_rank_against_horizon(models):
    models = {k: m for k, m in models.items() if "01_spectrum.json" in m and "02_decay.json" in m}
    if not models:
        return None
    figure, axes = panels(models)
    for ax, (name, m) in axes:
        rank, horizon = m["01_spectrum.json"]["effective_rank"], m["02_decay.json"]["horizon"]
        for i, layer in enumerate(m["01_spectrum.json"]["layers"]):
            few = len(rank) <= len(COLOURS)
            ax.scatter(horizon[i], rank[i], s=45 if few else 16, marker=MARKERS[i] if few else "o",
                       color=COLOURS[i] if few else plt.cm.viridis(i / (len(rank) - 1)),
                       label=f"layer {layer}" if few or i in (0, len(rank) - 1) else None)
        ax.set_xscale("log")
        for x in (256, 4096):
            ax.axvline(x, color="grey", linestyle=":", linewidth=1)
        ax.set_ylim(0, m["01_spectrum.json"]["spectrum"].shape[-1])
        ax.set_xlabel("decay horizon, tokens (dotted: 256 and 4,096)")
        ax.legend(fontsize=9)
    axes[0][0].set_ylabel("effective rank (top: all modes)")
    return figure, "Effective rank against decay horizon, one dot a head."


def draw_spectra(models):
    models = {k: m["01_spectrum.json"] for k, m in models.items() if "01_spectrum.json" in m}
    if not models:
        return None
    figure, axes = panels(models)
    for ax, (name, m) in axes:
        for i, layer in enumerate(m["spectrum"]):
            colour = plt.cm.viridis(0.92 * i / max(len(m["spectrum"]) - 1, 1))
            for j, head in enumerate(layer):
                ax.plot(range(1, len(head) + 1), np.maximum(head, 1e-8), color=colour, linewidth=1, alpha=0.8,
                        label=f"layer {m['layers'][i]}" if j == 0 and (len(m["spectrum"]) < 6 or i in (0, len(m["spectrum"]) - 1)) else None)
        ax.set_yscale("log")
        ax.set_xlabel("mode j")
        ax.legend(fontsize=9)
    axes[0][0].set_ylabel("singular value / sum of them")
    return figure, "Mean normalised singular values, one line a head."


def draw_loss(models):
    models = {k: {keep: m[f"03_loss{keep and '_' + keep}.json"] for keep in ("", "random", "bottom")
                  if f"03_loss{keep and '_' + keep}.json" in m} for k, m in models.items()}
    models = {k: m for k, m in models.items() if m}
    if not models:
        return None
    figure, axes = panels(models)
    for ax, (name, m) in axes:
        for i, (keep, run) in enumerate(m.items()):
            ranks = list(run["change"])
            ax.errorbar(ranks, [run["change"][r][0] for r in ranks], [run["change"][r][1] or 0 for r in ranks],
                        color=COLOURS[i], marker=MARKERS[i], capsize=3, label=f"{keep or 'top'} r modes kept")
        ax.set_yscale("symlog", linthresh=0.01)
        ax.axhline(0, color="grey", linewidth=1)
        rank_axis(ax, ranks)
        ax.legend(fontsize=9, loc="upper left")
    axes[0][0].set_ylabel("change in loss, nats a token\n(linear up to 0.01, then logarithmic)")
    return figure, "Change in next-token loss against rank, mean ± standard error over documents."


def draw_tasks(models):
    models = {k: {n: r for n, r in m.items() if n.startswith("04_ruler/")} for k, m in models.items()}
    models = {k: m for k, m in models.items() if m}
    if not models:
        return None
    figure, axes = panels(models, width=5.2, height=4.2)
    for ax, (name, m) in axes:
        ranks = sorted({r for run in m.values() for r in run["change"]}, reverse=True)
        for i, run in enumerate(m.values()):
            shift = 1 + 0.02 * (i - len(m) / 2)                            # so that equal points do not hide each other
            mine = list(run["change"])
            ax.errorbar([r * shift for r in mine], [run["change"][r][0] for r in mine], [run["change"][r][1] or 0 for r in mine],
                        color=COLOURS[i % 7], marker=MARKERS[i % 7], linestyle="-" if i < 7 else "--", capsize=3,
                        label=f"{run['task']} {run['length']} (full {run['full']:.0f})")
        ax.axhline(0, color="grey", linewidth=1)
        rank_axis(ax, ranks)
        ax.legend(fontsize=8, loc="lower left")
    axes[0][0].set_ylabel("change in score, points")
    return figure, "Change in task score against rank, mean ± standard error over samples."


def draw_size(models):
    runs = {k: m["03_loss.json"] for k, m in models.items() if "03_loss.json" in m}
    if not runs:
        return None
    figure, ax = plt.subplots(figsize=(6.2, 3.8))
    for i, (name, run) in enumerate(runs.items()):
        V, K = run["state"]
        ranks = list(run["change"])
        ax.errorbar([r * (K + V) / (K * V) for r in ranks], [run["change"][r][0] for r in ranks],
                    [run["change"][r][1] or 0 for r in ranks], color=COLOURS[i % 7], marker=MARKERS[i % 7], capsize=3, label=name)
    ax.axvline(1, color="grey", linestyle=":", linewidth=1)
    ax.set_xscale("log", base=2)
    ax.set_xticks([2.0 ** -k for k in range(6)], ["1/32", "1/16", "1/8", "1/4", "1/2", "1"])
    ax.set_yscale("symlog", linthresh=0.01)
    ax.set_xlabel("numbers carried across a boundary, factored r (K + V) / full K V")
    ax.set_ylabel("change in loss, nats a token\n(linear up to 0.01, then logarithmic)")
    ax.legend(fontsize=9)
    return figure, "What a smaller carried state costs. At 1 the factors are as large as the state itself."


# ---- the page ---------------------------------------------------------------------------------------------------------------

def table(head, rows):
    return "\n".join(["| " + " | ".join(head) + " |", "|" + " --- |" * len(head),
                      *("| " + " | ".join(str(cell) for cell in row) + " |" for row in rows)]) + "\n"


def scope(run):
    a, e = run["arguments"], run["environment"]
    return f"{a['docs']} documents of {a['tokens']:,} tokens from {a['documents']}, segment {a['segment']}, {e['dtype']} on {e['device']}"


def heads_section(models):
    rows = []
    for name, m in models.items():
        s, d = m.get("01_spectrum.json"), m.get("02_decay.json")
        if s:
            r = min(s["overlap"])
            big = max(s["energy"])
            rows.append([name, s["effective_rank"].size, f"{s['effective_rank'].min():.1f}, {np.median(s['effective_rank']):.1f}, {s['effective_rank'].max():.1f} of {s['spectrum'].shape[-1]}",
                         f"{100 * s['energy'][big].mean():.1f} % in {big}, {100 * s['energy'][r].mean():.1f} % in {r}",
                         f"{s['overlap'][r].mean():.2f} (chance {r / s['state'][1]:.2f})",
                         *((f"{d['horizon'].min():.0f}, {np.median(d['horizon']):.0f}, {d['horizon'].max():.0f}", f"{d['long']}", f"{100 * d['short']:.0f} %") if d else ("not run",) * 3)])
        elif d:
            rows.append([name, d["heads"], *("not run",) * 3, f"{d['horizon'].min():.0f}, {np.median(d['horizon']):.0f}, {d['horizon'].max():.0f}", d["long"], f"{100 * d['short']:.0f} %"])
    return rows and table(["model", "heads", "effective rank: least, median, most", "mean energy in the top modes",
                           "overlap of neighbouring top subspaces", "horizon in tokens: least, median, most", "over 4,096", "at most 256"], rows)


def loss_section(models):
    runs = {(name, run["arguments"]["keep"]): run for name, m in models.items() for file, run in m.items() if "03_loss" in file}
    ranks = sorted({rank for run in runs.values() for rank in run["change"]}, reverse=True)
    sizes = {tuple(run["state"]) for run in runs.values()}
    rows = [["full", *(f"{run['full']:.4f} nats" for run in runs.values()), *("1" for _ in sizes)]]
    rows += [[rank, *(number(*run["change"][rank], 4) if rank in run["change"] else "" for run in runs.values()),
              *(f"{rank * (V + K) / (V * K):.2f}" for V, K in sizes)] for rank in ranks]
    return runs and table(["rank", *(f"{name}, {keep} modes" for name, keep in runs),
                           *(f"numbers carried, factored / full ({V} x {K})" for V, K in sizes)], rows)


def task_section(models):
    runs = {(name, file): r for name, m in models.items() for file, r in m.items() if file.startswith("04_ruler/")}
    ranks = sorted({rank for r in runs.values() for rank in r["change"]}, reverse=True)
    rows = [[name, r["task"], f"{r['length']:,}", r["n"], f"{r['full']:.1f}",
             *(number(*r["change"][rank], 1) if rank in r["change"] else "" for rank in ranks)]
            for (name, _), r in runs.items()]
    return rows and table(["model", "task", "length", "samples", "full state", *(f"rank {rank}" for rank in ranks)], rows)


def main(*, results="results"):
    """Write report.md and its figures from the result files of every model.

    Args:
        results: the folder that stages 01 to 04 wrote to.
    """
    root = Path(str(results))
    folders = sorted(p for p in root.glob("*") if p.is_dir()) if root.is_dir() else []
    read = {p.name: read_model(p) for p in folders}
    models = {name: found for name, (found, _) in read.items() if found}
    if not models:
        raise gdn.Error(f"--results {results} holds no result file that can be read: run the stages 01 to 04 first")

    figures = {}
    for name, draw in (("rank_against_horizon", draw_rank_against_horizon), ("spectra", draw_spectra), ("loss", draw_loss),
                       ("tasks", draw_tasks), ("size", draw_size)):
        drawn = draw(models)
        if drawn:
            drawn[0].savefig(root / f"{name}.png")
            plt.close(drawn[0])
            figures[name] = f"![{drawn[1]}]({name}.png)\n\n*{drawn[1]}*\n"

    page = ["# How much of the Gated DeltaNet state do these models depend on?\n",
            "Every number below was measured in the runs listed here, except the column \"the post says\".\n"]
    for name, m in models.items():
        first = next(iter(m.values()))
        lines = [f"- **{name}** (`{first['model']}`, transformers {first['environment']['transformers']}, torch {first['environment']['torch']})"]
        for file, run in m.items():
            if not file.startswith("04_"):
                t = run["timing"]
                lines.append(f"    - {file[:-5]}: {scope(run)}; {t['total_seconds']:.0f} s, of these {t['model_seconds']:.0f} in the model and {t['truncate_seconds']:.0f} at the boundaries")
        tasks = [r for f, r in m.items() if f.startswith("04_")]
        if tasks:
            lines.append(f"    - 04_ruler: {', '.join(sorted({r['task'] for r in tasks}))}; segment {tasks[0]['arguments']['segment']}; {sum(r['timing']['total_seconds'] for r in tasks):.0f} s, of these {sum(r['timing']['model_seconds'] for r in tasks):.0f} in the model and {sum(r['timing']['truncate_seconds'] for r in tasks):.0f} at the boundaries")
        page.append("\n".join(lines) + "\n")
    missing = [f"- {name}: {problem}" for name, (found, problems) in read.items() for problem in problems]
    if missing:
        page += ["Not in this report:\n", "\n".join(missing) + "\n"]
    page += ["## Heads: spectrum and memory\n", heads_section(models) or "Neither stage 01 nor stage 02 has run.\n",
             figures.get("rank_against_horizon", ""), figures.get("spectra", ""),
             "## Next-token loss\n", loss_section(models) or "Stage 03 has not run.\n", figures.get("loss", ""), figures.get("size", ""),
             "## Tasks\n", task_section(models) or "Stage 04 has not run.\n", figures.get("tasks", ""),
             "## The post's claims\n",
             "A claim is compared where model, documents and length are those it was made for. The post measured Qwen3.5-0.8B on web "
             "text (documents of up to 16K tokens) and on RULER's prompts.\n",
             table(["claim", "the post says", *models], [[c[0], c[1], *(claim_cell(m, c) for m in models.values())] for c in CLAIMS])]
    path = root / "report.md"
    path.write_text("\n".join(part for part in page if part), encoding="utf-8")
    print(path)


if __name__ == "__main__":
    gdn.command(main)

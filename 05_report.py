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
    if found["effective_rank"].shape != found["spectrum"].shape[:2] or len(found["layers"]) != len(found["spectrum"]):
        raise ValueError("shapes differ")
    min(found["energy"]), min(found["overlap"]), found["effective_rank"].max(), 1 / found["state"][1]
    return found


def decay(data):
    r = data["results"]
    horizon = np.array(r["horizon"], float)
    if horizon.ndim != 2 or horizon.size != r["heads"]:
        raise ValueError("shapes differ")
    return {"horizon": horizon, "long": int(r["long_heads"]), "short": float(r["short_share"]), "heads": int(r["heads"])}


def changes(full, others):
    """{rank: (mean, standard error or None)} of the paired changes, the largest rank first."""
    pairs = {int(k): gdn.mean_se(np.subtract(v, full).tolist()) for k, v in others.items() if k != "full"}
    return {k: (pairs[k]["mean"], pairs[k]["se"]) for k in sorted(pairs, reverse=True)}


def loss(data):
    values, (V, K) = data["results"]["loss"], data["results"]["state"]
    1 / (V * K), values["full"][0]
    return {"full": float(np.mean(values["full"])), "change": changes(values["full"], values),
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
            run = {**numbers, **{key: data[key] for key in ("arguments", "model", "environment", "timing")}}
            scope(run), spent(run), Path(run["model"]), run["environment"]["torch"], run["environment"]["transformers"]
            found[path.relative_to(folder).as_posix()] = run
        except (KeyError, IndexError, TypeError, ValueError, AttributeError, ArithmeticError):
            problems.append(f"{path.relative_to(folder)} is damaged: delete it and run its stage again")
    both = [found.get("01_spectrum.json", {}).get("effective_rank"), found.get("02_decay.json", {}).get("horizon")]
    if all(values is not None for values in both) and both[0].shape != both[1].shape:
        problems.append("02_decay.json has other heads than 01_spectrum.json: delete one and run its stage again")
        del found["02_decay.json"]
    if len({run["environment"].get("weights") for run in found.values()}) > 1:
        problems.append("its files come from different weights: delete the older ones and run their stages again")
    if not any(name.startswith("04_ruler/") for name in found):
        problems.append("04_ruler has not run")
    return found, problems


# ---- the post's claims -------------------------------------------------------------------------------------------------
#
# The post names neither its web text nor the length of its documents, only that they go up to 16K tokens: C4 and 16,384
# tokens stand for them. Of the multikey tasks we take niah_multikey_2. A claim is compared only on Qwen3.5-0.8B.

def number(mean, se, digits):
    return f"{mean:+.{digits}f}" + ("" if se is None else f" ± {se:.{digits}f}")


def web_text(*names, docs=None):
    """How the runs of some result files differ from the post's: a function of a model."""
    def differs(model):
        for arguments in (model[name]["arguments"] for name in names):
            wanted = {"documents": "c4", "tokens": 16384, "segment": 256, **({"docs": docs} if docs else {})}
            for flag, value in wanted.items():
                if arguments.get(flag) != value:
                    yield f"--{flag} {arguments.get(flag)}"
    return names, differs


def loss_at(rank):
    def measured(model):
        change = model["03_loss.json"]["change"].get(rank)
        return change and number(*change, 4) + " nats"
    return measured


def ranks_of_long_heads(model):
    long = model["01_spectrum.json"]["effective_rank"][model["02_decay.json"]["horizon"] > 4096]
    if len(long) < 2:
        return f"{long[0]:.0f} (one head)" if len(long) else "no such head"
    return f"{long.min():.0f} to {long.max():.0f} ({len(long)} heads)"


def task(name, lengths, ranks):
    """The changes measured on a task at some ranks, and how its runs differ from the post's."""
    def runs(model):
        every = [run for file, run in model.items() if file.startswith("04_ruler/") and run["task"] == name]
        return [run for run in every if run["length"] in lengths] or every

    def measured(model):
        return "; ".join(f"at {run['length']:,}: full state {run['full']:.0f}, " + ", ".join(
            f"rank {rank} {number(*run['change'][rank], 1)}" for rank in ranks if rank in run["change"])
            for run in runs(model) if any(rank in run["change"] for rank in ranks))

    def differs(model):
        if {run["length"] for run in runs(model)} != set(lengths):
            yield "other lengths"
        if min(run["n"] for run in runs(model)) < 50:
            yield "fewer than 50 samples"
        if any(run["arguments"].get("segment") != 256 for run in runs(model)):
            yield "another segment"
        if not all(run["arguments"].get("data") for run in runs(model)):
            yield "our wording, not RULER's"
    return measured, (name, differs)


CLAIMS = [       # the claim, what the post says, the figure measured here, (the files it rests on, how their scope differs)
    ("heads with a decay horizon over 4,096 tokens", "48 of 288",
     lambda m: f"{m['02_decay.json']['long']} of {m['02_decay.json']['heads']}", web_text("02_decay.json")),
    ("heads that largely forget within 256 tokens", "61 %",
     lambda m: f"{100 * m['02_decay.json']['short']:.0f} %", web_text("02_decay.json")),
    ("effective rank of the heads with a horizon over 4,096", "30 to 47, of at most 128",
     ranks_of_long_heads, web_text("01_spectrum.json", "02_decay.json")),
    ("change in loss, 48 modes kept", "-0.0001 ± 0.0010 nats (8 documents)", loss_at(48), web_text("03_loss.json", docs=8)),
    ("change in loss, 12 modes kept", "+0.005 nats (8 documents)", loss_at(12), web_text("03_loss.json", docs=8)),
    ("multikey needles, 32 and 12 modes kept", "at baseline at 16K, 64K and 128K with 32; no measurable decline with 12",
     *task("niah_multikey_2", (16384, 65536, 131072), (32, 12))),
    ("frequent words (fwe), 32 and 12 modes kept", "no noticeable decline (lengths not named)",
     *task("fwe", (16384, 65536, 131072), (32, 12))),
    ("variable tracking (vt) at 64K, 32 to 12 modes kept", "+8 to +19 points, standard errors 3 to 5 (50 samples)",
     *task("vt", (65536,), (32, 24, 16, 12))),
    ("common words (cwe) at 64K, 32 modes kept", "full state 27; -18 points (50 samples)", *task("cwe", (65536,), (32,))),
]


def claim_cell(model, measured, needs, differs):
    """What was measured here for a claim, and in what its scope differs from the post's."""
    files = [needs] if isinstance(needs, str) else needs
    if not all(any(file == name or file.startswith(f"04_ruler/{name}_") for file in model) for name in files):
        return "not run"
    value = measured(model)
    if not value:
        return "not run at these ranks"
    differences = list(dict.fromkeys(differs(model)))
    if not all(Path(run["model"]).name in ("Qwen3.5-0.8B", "Qwen3.5-0.8B-Base") for run in model.values()):
        differences.insert(0, "another model")
    return f"{value}<br>" + (f"*scope differs: {', '.join(differences)}*" if differences else "*same scope*")


# ---- figures ---------------------------------------------------------------------------------------------------------------

def panels(models, width=4.6, height=3.8, sharey=True):
    figure, axes = plt.subplots(1, len(models), figsize=(width * max(len(models), 1.35), height), sharey=sharey,
                                squeeze=False)
    for ax, name in zip(axes[0], models):
        ax.set_title(name)
    return figure, list(zip(axes[0], models.values()))


def rank_axis(ax, ranks):
    ax.set_xscale("log", base=2)
    ax.invert_xaxis()
    ax.set_xticks(sorted(ranks), [str(rank) for rank in sorted(ranks)])
    ax.minorticks_off()
    ax.set_xlabel("modes kept per head, r")


def loss_axis(ax):
    ax.set_yscale("symlog", linthresh=0.01)
    ticks = [0, 0.005, *(m * 10.0 ** e for e in range(-2, 3) for m in (1, 2, 5))]
    low, high = ax.get_ylim()
    ticks = [t for tick in ticks for t in {tick, -tick} if low <= t <= high]
    ax.set_yticks(ticks, [f"{t:g}" for t in ticks])
    ax.minorticks_off()


def draw_rank_against_horizon(models):
    models = {k: m for k, m in models.items() if "01_spectrum.json" in m and "02_decay.json" in m}
    if not models:
        return None
    figure, axes = panels(models, sharey=False)
    for ax, m in axes:
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
    for ax, m in axes:
        for i, layer in enumerate(m["spectrum"]):
            colour = plt.cm.viridis(0.92 * i / max(len(m["spectrum"]) - 1, 1))
            for j, head in enumerate(layer):
                shown = j == 0 and (len(m["spectrum"]) < 6 or i in (0, len(m["spectrum"]) - 1))
                ax.plot(range(1, len(head) + 1), head, color=colour, linewidth=1, alpha=0.8,
                        label=f"layer {m['layers'][i]}" if shown else None)
        ax.set_yscale("log")
        ax.set_ylim(1e-6, 1)
        ax.set_xlabel("mode j")
        ax.legend(fontsize=9)
    axes[0][0].set_ylabel("singular value / sum of them")
    return figure, "Mean normalised singular values, one line a head."


def error_bars(ax, x, change, style, label, line="-"):
    """Means with their standard errors, where there is one; style picks colour and marker."""
    ax.errorbar(x, [mean for mean, _ in change.values()], [np.nan if se is None else se for _, se in change.values()],
                color=COLOURS[style % 7], marker=MARKERS[style % 7], linestyle=line, capsize=3, label=label)


def draw_loss(models):
    files = {"top": "03_loss.json", "random": "03_loss_random.json", "bottom": "03_loss_bottom.json"}
    models = {name: m for name, m in models.items() if set(files.values()) & set(m)}
    if not models:
        return None
    figure, axes = panels(models)
    for ax, m in axes:
        runs = {keep: m[file] for keep, file in files.items() if file in m}
        for keep, run in runs.items():
            error_bars(ax, list(run["change"]), run["change"], list(files).index(keep), f"{keep} r modes kept")
        ax.axhline(0, color="grey", linewidth=1)
        rank_axis(ax, {rank for run in runs.values() for rank in run["change"]})
        ax.legend(fontsize=9, loc="upper left")
    loss_axis(axes[0][0])
    axes[0][0].set_ylabel("change in loss, nats a token\n(linear up to 0.01, then logarithmic)")
    return figure, "Change in next-token loss against rank, mean ± standard error over documents."


def draw_tasks(models):
    models = {name: sorted((run for file, run in m.items() if file.startswith("04_ruler/")),
                           key=lambda run: (run["task"], run["length"])) for name, m in models.items()}
    models = {name: runs for name, runs in models.items() if runs}
    if not models:
        return None
    figure, axes = panels(models, width=5.2, height=4.8)
    kinds = sorted({(run["task"], run["length"]) for runs in models.values() for run in runs})
    for ax, runs in axes:
        for run in runs:
            i = kinds.index((run["task"], run["length"]))
            x = [rank * (1 + 0.02 * (i - len(kinds) / 2)) for rank in run["change"]]       # so that none hides another
            error_bars(ax, x, run["change"], i, f"{run['task']} {run['length']:,} (full {run['full']:.0f})",
                       "-" if i < 7 else "--")
        ax.axhline(0, color="grey", linewidth=1)
        rank_axis(ax, {rank for run in runs for rank in run["change"]})
        ax.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.15), ncol=2)         # below: curves go anywhere
    axes[0][0].set_ylabel("change in score, points")
    return figure, "Change in task score against rank, mean ± standard error over samples."


def draw_size(models):
    runs = {name: m["03_loss.json"] for name, m in models.items() if "03_loss.json" in m}
    if not runs:
        return None
    figure, ax = plt.subplots(figsize=(6.2, 3.8))
    for i, (name, run) in enumerate(runs.items()):
        V, K = run["state"]
        error_bars(ax, [rank * (K + V) / (K * V) for rank in run["change"]], run["change"], i, name)
    ax.axvline(1, color="grey", linestyle=":", linewidth=1)
    ax.set_xscale("log", base=2)
    ax.set_xticks([2.0 ** -k for k in range(6)], ["1", "1/2", "1/4", "1/8", "1/16", "1/32"])
    loss_axis(ax)
    ax.set_xlabel("numbers carried across a boundary, factored r (K + V) / full K V")
    ax.set_ylabel("change in loss, nats a token\n(linear up to 0.01, then logarithmic)")
    ax.legend(fontsize=9)
    return figure, ("Change in loss against the size that the carried states would have if they were stored as two factors. "
                    "Nothing smaller was run: between boundaries the state is whole.")


# ---- the page ---------------------------------------------------------------------------------------------------------------

def table(head, rows):
    return "\n".join(["| " + " | ".join(head) + " |", "|" + " --- |" * len(head),
                      *("| " + " | ".join(str(cell) for cell in row) + " |" for row in rows)]) + "\n"


def scope(run):
    a, e = run["arguments"], run["environment"]
    what = (f"{run['n']} samples" + (" of RULER's generator" if a["data"] else f", seed {a['seed']}") if "task" in run else
            f"{a['docs']} documents of {a['tokens']:,} tokens from {a['documents']}")
    return f"{what}, segment {a['segment']}, {e['dtype']} on {e['device']}"


def spent(run):
    total, model, boundary = (run["timing"][f"{key}_seconds"] for key in ("total", "model", "truncate"))
    return f"{total:.0f} s, of these {model:.0f} in the model and {boundary:.0f} at boundaries"


def least_median_most(values, digits):
    return ", ".join(f"{x:,.{digits}f}" for x in (values.min(), np.median(values), values.max()))


def heads_section(models):
    rows = []
    for name, m in models.items():
        s, d = m.get("01_spectrum.json"), m.get("02_decay.json")
        if s or d:
            row = [name, s["effective_rank"].size if s else d["heads"], *["not run"] * 6]
            if s:
                few, many, modes = min(s["energy"]), max(s["energy"]), s["spectrum"].shape[-1]
                row[2:5] = [f"{least_median_most(s['effective_rank'], 1)} of {modes}",
                            f"{s['energy'][many].mean():.1%} in {many}, {s['energy'][few].mean():.1%} in {few}",
                            f"{s['overlap'][few].mean():.2f} for the top {few} (chance {few / s['state'][1]:.2f})"]
            if d:
                row[5:] = [least_median_most(d["horizon"], 0), d["long"], f"{d['short']:.0%}"]
            rows.append(row)
    return rows and table(["model", "heads", "effective rank: least, median, most", "mean energy in the top modes",
                           "overlap of neighbouring boundaries' subspaces", "horizon in tokens: least, median, most",
                           "over 4,096", "at most 256"], rows)


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
    runs = sorted(((name, run) for name, m in models.items() for file, run in m.items() if file.startswith("04_ruler/")),
                  key=lambda pair: (pair[0], pair[1]["task"], pair[1]["length"]))
    ranks = sorted({rank for _, run in runs for rank in run["change"]}, reverse=True)
    rows = [[name, run["task"], f"{run['length']:,}", run["n"], f"{run['full']:.1f}",
             *(number(*run["change"][rank], 1) if rank in run["change"] else "" for rank in ranks)] for name, run in runs]
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
            gdn.write_whole(root / f"{name}.png", lambda temporary: drawn[0].savefig(temporary, format="png"))
            plt.close(drawn[0])
            figures[name] = f"![{drawn[1]}]({name}.png)\n\n*{drawn[1]}*\n"

    page = ["# How much of the Gated DeltaNet state do these models depend on?\n",
            "Every number below was measured in the runs listed here, except the column \"the post says\". Truncated states "
            "grow to full rank again between boundaries, and attention layers keep all they saw: this measures what the "
            "model depends on, not a saving of memory or time.\n"]
    for name, m in models.items():
        lines = []
        for file, run in m.items():
            stage = f"04_ruler, {run['task']} at {run['length']:,}" if "task" in run else file.removesuffix(".json")
            lines.append(f"    - {stage}: {scope(run)}; {spent(run)}")
        versions = sorted({f"transformers {run['environment']['transformers']}, torch {run['environment']['torch']}"
                           for run in m.values()})
        page.append("\n".join([f"- **{name}** (`{next(iter(m.values()))['model']}`; {'; '.join(versions)})", *lines]) + "\n")
    missing = [f"- {name}: {problem}" for name, (_, problems) in read.items() for problem in problems]
    if missing:
        page += ["Not in this report:\n", "\n".join(missing) + "\n"]
    page += ["## Heads: spectrum and memory\n", heads_section(models) or "Neither stage 01 nor stage 02 has run.\n",
             figures.get("rank_against_horizon", ""), figures.get("spectra", ""),
             "## Next-token loss\n", loss_section(models) or "Stage 03 has not run.\n",
             figures.get("loss", ""), figures.get("size", ""),
             "## Tasks\n", task_section(models) or "Stage 04 has not run.\n", figures.get("tasks", ""),
             "## The post's claims\n",
             "The post measured Qwen3.5-0.8B on web text (documents of up to 16K tokens) and on RULER's own prompts. A figure "
             "is comparable where its scope is the same; elsewhere the cell says what differs. That variable tracking "
             "improves in the post's distilled control too cannot be tested: that model is not published.\n",
             table(["claim", "the post says", *models],
                   [[claim, said, *(claim_cell(m, measured, *scope) for m in models.values())]
                    for claim, said, measured, scope in CLAIMS])]
    path = root / "report.md"
    text = "\n".join(part for part in page if part)
    gdn.write_whole(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))
    print(path)


if __name__ == "__main__":
    gdn.command(main)

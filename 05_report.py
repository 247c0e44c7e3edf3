"""The report: what stages 01 to 04 found, for every model in the results, and what the post says.

    python 05_report.py                             # writes results/report.md and its figures
    python 05_report.py --model Qwen/Qwen3.5-0.8B   # of that model alone

What has not run, is unfinished or cannot be read is named.
"""
import os
import re
import textwrap
from pathlib import Path

import gdn
import matplotlib
matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np

# Colours that colour-blind readers can tell apart (Okabe & Ito 2008).
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS, LINES = "osD^vPX", ("-", "--", ":", "-.")
plt.rcParams.update({"font.size": 11, "axes.spines.right": False, "axes.spines.top": False,
                     "axes.grid": True, "grid.alpha": 0.25, "axes.formatter.useoffset": False,
                     "figure.constrained_layout.use": True, "savefig.dpi": 110,
                     "savefig.bbox": "tight"})


# ---- reading ------------------------------------------------------------------------------------

DEFAULT = {"heads": "all", "keep": "top", "store": "float32"}


def read_model(folder):
    """The result files of a model, [record], defaults first, and what is missing or unfinished."""
    records, problems = [], []
    for path in sorted(folder.glob("**/*.json")):
        try:
            record = gdn.read_results(path)
        except gdn.Error as error:
            problems.append(str(error))
            continue
        record["file"] = path.relative_to(folder).as_posix()
        if record["items"]:
            records.append(record)
        if len(record["items"]) < asked(record):
            problems.append(f"{folder.name}/{record['file']} is unfinished: {counted(record)}")
    records.sort(key=lambda run: (run["script"], variant(run), run["arguments"].get("length", 0)))
    for script in ("01_spectrum", "02_decay", "03_loss", "04_ruler"):
        if not find(records, script):
            problems.append(f"{script} has not run on {folder.name}")
    if len({record["environment"]["weights"] for record in records}) > 1:
        problems.append(f"not all results of {folder.name} were made with the same weights")
    return records, problems


def find(records, script, **arguments):
    """The runs of a stage with these arguments, as far as it has them; the default run first."""
    found = []
    for record in records:
        made = {**arguments, **record["arguments"]}
        if record["script"] == script and all(made[key] == arguments[key] for key in arguments):
            found.append(record)
    return found


def first(records, *scripts):
    """The first run of each of these stages, [] if one has not run."""
    found = [record for script in scripts for record in find(records, script)[:1]]
    return found if len(found) == len(scripts) else []


def variant(record):
    """In what a run differs from the default: '' or 'heads over-256 (2 of 12), random modes'."""
    made, words = {**DEFAULT, **record["arguments"]}, []
    if made["heads"] != "all":
        cut, every = record["heads_cut"]
        words.append(f"heads {made['heads']} ({cut} of {every})")
    if made["keep"] != "top":
        words.append(f"{made['keep']} modes")
    if made["store"] != "float32":
        words.append(f"stored in {made['store']}")
    if made["segment"] != 256:
        words.append(f"segment {made['segment']}")
    if made.get("data"):
        words.append("RULER's prompts")
    return ", ".join(words)


def named(record):
    return variant(record) or "all heads, top modes"


def asked(record):
    """How many documents or samples a run was to have."""
    return record["arguments"]["samples" if record["script"] == "04_ruler" else "docs"]


def counted(record):
    """What a mean is over: '8 documents of 4,096 tokens from c4', '3 of 25 samples, unfinished'."""
    made, n = record["arguments"], len(record["items"])
    words = f"{n} of {asked(record)}" if n < asked(record) else f"{n}"
    words += " sample" if record["script"] == "04_ruler" else " document"
    if asked(record) > 1 or n > 1:
        words += "s"
    if record["script"] != "04_ruler":
        words += f" of {made['tokens']:,} tokens from {Path(made['documents']).name}"
    return f"{words}, unfinished" if n < asked(record) else words


def setting(record):
    """A task and its length, and what is special about the run."""
    made, other = record["arguments"], variant(record)
    return f"{made['task']} at {made['length']:,} tokens" + (f" ({other})" if other else "")


def values(record, key, rank=None):
    """One measured thing of every document or sample, [items, ...]; at a rank if it has ranks."""
    items = record["items"]
    return np.array([item[key] if rank is None else item[key][str(rank)] for item in items])


def changes(record, key, rank):
    """By document or sample, the value at a rank less that of the untouched model: [items, ...]."""
    change = values(record, key, rank) - values(record, key, "full")
    return np.round(change, 12)                     # where all change alike, they do so exactly


def ranks_of(*records):
    ranks = {rank for record in records for rank in record["arguments"]["ranks"]}
    return sorted(ranks, reverse=True)


def near_12(record):
    """The rank that is spoken of where only one can be."""
    return min(ranks_of(record), key=lambda rank: abs(rank - 12))


def horizons(record):
    """Decay horizons of every head, [L, H], from the mean log a of all documents."""
    return gdn.decay_horizon(values(record, "log_a").mean(0)).numpy()


def codings(records):
    """The runs of all heads at the default boundaries and on the same documents as the first."""
    runs = find(records, "03_loss", heads="all", segment=256)
    return [record for record in runs if counted(record) == counted(runs[0])]


def by_rank(records):
    """The runs that are shown by rank: those in float32, and those that are not among codings."""
    return [record for record in find(records, "03_loss")
            if record["arguments"]["store"] == "float32" or record not in codings(records)]


# ---- the post's claims --------------------------------------------------------------------------
#
# The post names neither its web text nor the length of its documents, only that they go up to 16K
# tokens: C4 and 16,384 tokens stand for them. Of the multikey tasks we take niah_multikey_2.

POST = {"documents": "c4", "docs": 8, "tokens": 16384, "segment": 256}
LENGTHS = (16384, 65536, 131072)


def is_the_posts(record):
    """Whether the model is the hub's Qwen3.5-0.8B or -Base, or a folder of that name and shape."""
    model, shape = record["model"], {"layers": 24, "hidden": 1024, "heads": 16}
    if os.path.isabs(model):
        model = f"Qwen/{Path(model).name}"
    return (model in ("Qwen/Qwen3.5-0.8B", "Qwen/Qwen3.5-0.8B-Base") and record["shape"] == shape
            and len(record["layers"]) == 18 and record["state"] == [128, 128])


def differences(records):
    """In what the runs that the claims rest on differ from the post's, stage by stage."""
    words = [] if is_the_posts(records[0]) else ["another model"]
    for script in ("01_spectrum", "02_decay", "03_loss"):
        for record in find(records, script, **DEFAULT)[:1]:
            made = {**record["arguments"], "docs": len(record["items"])}
            off = [f"--{key} {made[key]}" for key in POST if made[key] != POST[key]]
            words.append(f"{script}: {', '.join(off) or 'same scope'}")
    runs = find(records, "04_ruler", **DEFAULT)
    if runs:
        off, lengths = [], sorted({record["arguments"]["length"] for record in runs})
        if not set(lengths) <= set(LENGTHS):
            off.append(f"lengths {', '.join(map(str, lengths))}")
        if min(len(record["items"]) for record in runs) < 50:
            off.append(f"{min(len(record['items']) for record in runs)} samples")
        if not all(record["arguments"]["data"] for record in runs):
            off.append("our wording, not RULER's")
        if any(record["arguments"]["segment"] != 256 for record in runs):
            off.append("another segment")
        words.append(f"04_ruler: {', '.join(off) or 'same scope'}")
    return "; ".join(words)


def long_heads(records):
    for record in find(records, "02_decay"):
        return f"{(horizons(record) > 4096).sum()} of {horizons(record).size}"


def short_heads(records):
    for record in find(records, "02_decay"):
        return f"{(horizons(record) <= 256).mean():.0%}"


def rank_of_long_heads(records):
    """Their range, and how many heads have fewer modes than keys drawn at random would give."""
    if not first(records, "01_spectrum", "02_decay"):
        return None
    record, decay = first(records, "01_spectrum", "02_decay")
    heads = values(record, "effective_rank").mean((0, 1))                           # [L, H]
    fewer = heads < values(record, "effective_rank_null").mean((0, 1))
    long, words = horizons(decay) > 4096, "no such head"
    if long.any():
        words = (f"{heads[long].min():.0f} to {heads[long].max():.0f}; fewer modes than with "
                 f"random keys in {fewer[long].sum()} of these {long.sum()}")
    return f"{words}; in {fewer.sum()} of all {fewer.size} heads fewer than with random keys"


def loss_at(records, rank):
    for record in find(records, "03_loss", **DEFAULT)[:1]:
        if rank in ranks_of(record):
            other = f" ({variant(record)})" if variant(record) else ""
            return f"{gdn.with_error(changes(record, 'loss', rank))} nats{other}"


def task_at(records, task, lengths, ranks):
    """A line for each run at the post's lengths; if there is none, for each at others."""
    runs, lines = find(records, "04_ruler", task=task, **DEFAULT), []
    at_the_posts = [record for record in runs if record["arguments"]["length"] in lengths]
    for record in at_the_posts or runs:
        words = [f"full state {values(record, 'scores', 'full').mean():.0f}"]
        for rank in ranks:
            if rank in ranks_of(record):
                words.append(f"rank {rank} {gdn.with_error(changes(record, 'scores', rank))}")
        lines.append(f"{setting(record)}, {counted(record)}: {', '.join(words)}")
    return "\n".join(lines)


CLAIMS = [  # the claim, what the post says, a model's cell ("" or None: not run), its arguments
    ("heads with a decay horizon over 4,096 tokens", "48 of 288", long_heads),
    ("heads that largely forget within 256 tokens: horizon at most 256", "61%", short_heads),
    ("effective rank of the heads with a horizon over 4,096", "30 to 47", rank_of_long_heads),
    ("change in loss, 48 modes kept", "-0.0001 ± 0.0010 nats", loss_at, 48),
    ("change in loss, 12 modes kept", "+0.005 nats", loss_at, 12),
    ("multikey needles, 32 and 12 modes kept", "at baseline with 32 at 16K, 64K and 128K; no "
     "measurable decline with 12", task_at, "niah_multikey_2", LENGTHS, (32, 12)),
    ("frequent words (fwe), 32 and 12 modes kept", "no noticeable decline",
     task_at, "fwe", LENGTHS, (32, 12)),
    ("variable tracking (vt) at 64K, 32 to 12 modes kept", "+8 to +19 points, errors 3 to 5",
     task_at, "vt", (65536,), (32, 24, 16, 12)),
    ("common words (cwe) at 64K, 32 modes kept", "full state 27; -18 points",
     task_at, "cwe", (65536,), (32,))]


# ---- figures: a function fills one panel with its runs; its docstring is the caption ------------

def style(i):
    return {"color": COLOURS[i % 7], "marker": MARKERS[i % 7], "linestyle": LINES[i // 7 % 4]}


def layer_styles(layers):
    """(i, style) of every layer: a few by colour and marker, many along a scale of colours."""
    few = len(layers) <= len(COLOURS)
    for i, layer in enumerate(layers):
        colour = COLOURS[i] if few else plt.cm.viridis(0.92 * i / (len(layers) - 1))
        shown = few or i in (0, len(layers) - 1)
        yield i, {"color": colour, "marker": MARKERS[i] if few else "o", "linestyle": "",
                  "label": f"layer {layer}" if shown else None}


def error_bars(ax, x, rows, looks, label):
    """Means of the rows [points][items] with their standard errors."""
    means, errors = zip(*(gdn.mean_se(row) for row in rows))
    ax.errorbar(x, means, [error or 0 for error in errors], capsize=3, label=label, **looks)


def steps(ax, names, label):
    """An x axis with a step for each name, however few there are."""
    ax.set_xticks(range(len(names)), names)
    ax.set(xlabel=label, xlim=(-0.5, len(names) - 0.5))


def loss_axis(ax):
    """At least ± 0.01 nats: nothing looks like much that is not."""
    ax.axhline(0, color="grey", linewidth=1)
    ax.update_datalim([(0, -0.01), (0, 0.01)])
    ax.set_yscale("symlog", linthresh=0.01)
    ax.set_ylabel("change in loss, nats (linear up to 0.01)")


def rank_curves(ax, runs, name, measure, key):
    """measure(record, key, rank) [items] of every run against its ranks, the largest to the left.

    name(record) is its label; the runs stand a little apart, all within a third of a step.
    """
    ranks, apart = ranks_of(*runs), min(0.06, 0.3 / len(runs))
    for i, (record, label) in enumerate(zip(runs, labels(runs, name))):
        x = [ranks.index(rank) + apart * (i - (len(runs) - 1) / 2) for rank in ranks_of(record)]
        rows = [measure(record, key, rank) for rank in ranks_of(record)]
        error_bars(ax, x, rows, style(i), label)
    steps(ax, [str(rank) for rank in ranks], "modes kept per head, r")


def labels(runs, name):
    """The runs' names, and what each is a mean over where that differs ($ would be a formula)."""
    counts = [counted(record) for record in runs]
    if len(set(counts)) == 1:
        counts = [""] * len(runs)
    found = [": ".join(filter(None, (name(record), n))) for record, n in zip(runs, counts)]
    return [label.replace("$", r"\$") for label in found]


def loss_panel(ax, runs):
    """Change in next-token loss, mean ± standard error over documents."""
    rank_curves(ax, runs, named, changes, "loss")
    loss_axis(ax)


def kl_panel(ax, runs):
    """KL divergence from the untouched model, mean ± standard error over documents."""
    rank_curves(ax, runs, named, values, "kl")
    ax.set(yscale="log", ylabel="KL from the untouched model, nats")


def after_panel(ax, runs):
    """Change in loss by the tokens read since the last boundary, mean ± standard error."""
    [record] = runs
    edges, shown, names = record["after_bins"], ranks_of(record), ["first\nsegment"]
    for low, high in zip(edges, edges[1:]):
        names.append(f"{low}" if high == low + 1 else f"{low}-{high - 1}")
    if len(shown) > 6:
        shown = [rank for rank in shown if rank in (32, 12, 4, 1, 0)] or shown[:6]
    for i, rank in enumerate(shown):
        rows = changes(record, "after", rank).T                                 # [bins, documents]
        error_bars(ax, range(len(names)), rows, style(i), f"rank {rank}")
    steps(ax, names, "tokens since the boundary")
    loss_axis(ax)


def bytes_panel(ax, runs):
    """KL against the bytes carried of a head, by how states are stored (colours) and which modes \
are kept (lines), mean ± standard error over documents. Stars: the whole state, rounded."""
    stores = list(dict.fromkeys(record["arguments"]["store"] for record in runs))
    keeps = list(dict.fromkeys(record["arguments"]["keep"] for record in runs))
    sizes = [size for record in runs for size in record["bytes"].values() if size] or [1]
    low, high = int(np.log2(min(sizes)) // 2), int(-(-np.log2(max(sizes)) // 2))
    ticks = [4.0 ** n for n in range(low - 1, high + 1)]            # the first stands for 0 bytes
    for record, label in zip(runs, labels(runs, named)):
        looks = style(stores.index(record["arguments"]["store"]))
        looks["linestyle"] = LINES[keeps.index(record["arguments"]["keep"])]
        whole = [rank for rank in ranks_of(record) if rank == min(record["state"])]
        parts = [rank for rank in ranks_of(record) if rank not in whole]
        star = {**looks, "marker": "*", "markersize": 14, "markeredgecolor": "black"}
        for ranks, looks in ((parts, looks), (whole, star)):
            if ranks:
                x = [record["bytes"][str(rank)] or ticks[0] for rank in ranks]
                error_bars(ax, x, [values(record, "kl", rank) for rank in ranks], looks, label)
                label = None
    ax.set_xscale("log", base=4)
    ax.set_xticks(ticks, ["0", *(f"{tick:,.0f}" for tick in ticks[1:])], fontsize=8)
    ax.set(xlabel="bytes carried per head", xlim=(ticks[0] / 1.5, ticks[-1] * 1.5),
           yscale="log", ylabel="KL from the untouched model, nats")


def tasks_panel(ax, runs):
    """Change in task score, mean ± standard error over samples."""
    rank_curves(ax, runs, task_and_score, changes, "scores")
    ax.axhline(0, color="grey", linewidth=1)
    ax.update_datalim([(0, -1), (0, 1)])
    ax.set_ylabel("change in score, points")


def task_and_score(record):
    return f"{record['arguments']['task']} (full {values(record, 'scores', 'full').mean():.0f})"


def lengths_panel(ax, runs):
    """Task score against length, mean ± standard error over samples."""
    shared = [rank for rank in ranks_of(*runs) if all(rank in ranks_of(record) for record in runs)]
    for i, rank in enumerate(["full", *shared]):
        rows = [values(record, "scores", rank) for record in runs]
        label = "full state" if rank == "full" else f"rank {rank}"
        error_bars(ax, range(len(runs)), rows, style(i), label)
    steps(ax, [f"{record['arguments']['length']:,}" for record in runs], "length, tokens")
    ax.update_datalim([(0, 0), (0, 100)])
    ax.set_ylabel("score, points")


def horizon_panel(ax, runs):
    """Effective rank against decay horizon, a filled mark a head; the hollow mark joined to it is \
what random keys would give (dotted: 256 and 4,096 tokens; line: all modes)."""
    record, decay = runs
    x, y = horizons(decay), values(record, "effective_rank").mean((0, 1))           # [L, H]
    null = values(record, "effective_rank_null").mean((0, 1))
    for i, looks in layer_styles(record["layers"]):
        ax.plot([x[i], x[i]], [y[i], null[i]], color=looks["color"], linewidth=0.8)
        ax.plot(x[i], null[i], **{**looks, "label": None}, markerfacecolor="white")
        ax.plot(x[i], y[i], **looks)
    for limit in (256, 4096):
        ax.axvline(limit, color="grey", linestyle=":", linewidth=1)
    ax.axhline(min(record["state"]), color="grey", linewidth=1)
    ax.update_datalim([(256, 0)])
    ax.set(xscale="log", xlabel="decay horizon, tokens", ylabel="effective rank")


def along_panel(ax, runs):
    """Effective rank along the document: mean over heads, and their middle half."""
    record, decay = runs
    effective, long = values(record, "effective_rank").mean(0), horizons(decay) > 256
    x = record["items"][0]["positions"]
    for i, (chosen, label) in enumerate(((long, "over 256"), (~long, "at most 256"))):
        if chosen.any():
            heads = effective[:, chosen]                                        # [boundary, heads]
            ax.plot(x, heads.mean(1), markersize=4, **style(i),
                    label=f"horizon {label} tokens (heads: {chosen.sum()})")
            ax.fill_between(x, *np.quantile(heads, (0.25, 0.75), axis=1), color=COLOURS[i],
                            alpha=0.15)
    ax.update_datalim([(x[0], 0)])
    ax.set(xlabel="tokens read", ylabel="effective rank")


def readout_panel(ax, runs):
    """What is read of the tail against its energy, a mark a head; on the line, as much."""
    [record] = runs
    rank = near_12(record)
    x = np.clip(1 - values(record, "energy", rank).mean(0), 1e-14, 1)                # [L, H]
    y = np.clip(1 - values(record, "readout", rank).mean(0), 1e-14, 1)
    for i, looks in layer_styles(record["layers"]):
        ax.plot(x[i], y[i], **looks)
    line = [min(x.min(), y.min(), 0.1), 1]
    ax.plot(line, line, color="grey", linewidth=1)
    ax.set(xscale="log", xlabel=f"share of energy beyond {rank} modes",
           yscale="log", ylabel="share of what is read beyond them")


def spectra_panel(ax, runs):
    """Singular values over their sum, mean over boundaries and documents, a line a head."""
    [record] = runs
    spectrum = values(record, "spectrum").mean(0)                                   # [L, H, M]
    for i, looks in layer_styles(record["layers"]):
        lines = ax.plot(range(1, spectrum.shape[-1] + 1), spectrum[i].T, color=looks["color"],
                        linewidth=1)
        lines[0].set_label(looks["label"])
    ax.set(xlabel="mode j", yscale="log", ylim=(1e-6, 1), ylabel="singular value / sum of them")


FIGURES = [(loss_panel, by_rank), (kl_panel, by_rank), (after_panel, first, "03_loss"),
           (bytes_panel, codings), (tasks_panel, find, "04_ruler"),
           (lengths_panel, find, "04_ruler"), (horizon_panel, first, "01_spectrum", "02_decay"),
           (along_panel, first, "01_spectrum", "02_decay"),
           (readout_panel, first, "01_spectrum"), (spectra_panel, first, "01_spectrum")]


def panels(models, panel, select, *arguments):
    """{title: runs}: a panel a model, or a length or task of it and a way of truncating."""
    groups = {}
    for name, records in models.items():
        runs = select(records, *arguments)
        for record in runs:
            words = [name]
            if panel is tasks_panel:
                words.append(f"{record['arguments']['length']:,} tokens")
            if panel is lengths_panel:
                words.append(record["arguments"]["task"])
            if panel in (tasks_panel, lengths_panel):
                words.append(variant(record))
            if select is first:
                words.append(variant(runs[0]))
            groups.setdefault(", ".join(filter(None, words)), []).append(record)
    if panel is lengths_panel:
        groups = {title: runs for title, runs in groups.items() if len(runs) > 1}
    return groups


def heading(title, runs):
    """A panel's title, and what its runs are means over, unless there is too much to say."""
    counts = list(dict.fromkeys(counted(record) for record in runs))
    if len(counts) > 2:
        counts = ["means over what the legend says"]
    return "\n".join(textwrap.fill(line, 50) for line in (title, *counts))


def whole_decades(axes):
    """One logarithmic y axis for all means; linear below its first decade, so that 0 is seen."""
    means = np.concatenate([bars[0].get_ydata() for ax in axes for bars in ax.containers])
    above = means[means > 0] if means.any() else np.array([1e-9])
    low = 10.0 ** np.floor(np.log10(above.min() / 1.1))
    high = 10.0 ** np.ceil(np.log10(above.max() * 1.1))
    for ax in axes:
        ax.set_ylim(low, high)
        if (means == 0).any():
            ax.set_yscale("symlog", linthresh=low, linscale=0.5)
            ax.set(ylim=(-low / 4, high), ylabel=f"{ax.get_ylabel()} (linear up to {low:.0e})")


def draw(root, models, panel, *select):
    """Write a figure, at most three panels a row, and return the page's lines for it."""
    groups, name, caption = panels(models, panel, *select), panel.__name__[:-6], panel.__doc__
    if not groups:
        return ""
    columns = min(len(groups), 3)
    rows = -(-len(groups) // columns)
    figure, axes = plt.subplots(rows, columns, figsize=(4.8 * max(columns, 1.3), 4.6 * rows),
                                squeeze=False, sharey=True)
    for ax in axes.flat[len(groups):]:
        ax.remove()
    axes = axes.flat[:len(groups)]
    for ax, (title, runs) in zip(axes, groups.items()):
        panel(ax, runs)
        ax.set_title(heading(title, runs), parse_math=False, fontsize=10)
        handles, words = ax.get_legend_handles_labels()
        ax.legend(handles, words, fontsize=9, loc="upper center", bbox_to_anchor=(0.5, -0.24),
                  ncol=2 if max(map(len, words)) < 34 else 1)
    if panel in (kl_panel, bytes_panel):
        whole_decades(axes)
    for ax in axes:
        ax.label_outer()
    gdn.write_whole(root / f"{name}.png", lambda path: figure.savefig(path, format="png"))
    plt.close(figure)
    return f"![{caption}]({name}.png)\n\n*{caption}*\n"


# ---- the page -----------------------------------------------------------------------------------

def escaped(text):
    """A text that Markdown shows as it is, in a table too."""
    return re.sub(r"([\\`*_\[\]<>&|$~])", r"\\\1", str(text)).replace("\n", "<br>")


def table(head, rows):
    lines = [[escaped(cell) for cell in line] for line in (head, *rows)]
    lines.insert(1, ["---"] * len(head))
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def share(record, rank):
    """A change in loss as a share of what wiping the same states costs: ' (3% of rank 0)'."""
    if rank == 0 or 0 not in ranks_of(record) or changes(record, "loss", 0).mean() <= 0:
        return ""
    part = changes(record, "loss", rank).mean() / changes(record, "loss", 0).mean()
    return f" ({round(part, 2) + 0.0:.0%} of rank 0)"               # + 0.0: no -0%


def level(numbers):
    """A mean that is no change, with its standard error."""
    return gdn.with_error(numbers).removeprefix("+")


def effects(record, rank):
    """Change in loss, KL and agreement, as cells of a table."""
    return [gdn.with_error(changes(record, "loss", rank)) + share(record, rank),
            level(values(record, "kl", rank)), f"{values(record, 'agree', rank).mean():.1%}"]


def loss_tables(models):
    """A table a run, a row a rank."""
    pages = []
    for name, records in models.items():
        for record in by_rank(records):
            rows = [["full", f"{values(record, 'loss', 'full').mean():.4f} nats", "", ""]]
            rows += [[rank, *effects(record, rank)] for rank in ranks_of(record)]
            said = escaped(f"{named(record)}; {counted(record)}")
            pages += [f"**{escaped(name)}**: {said}\n",
                      table(["rank", "change in loss, nats", "KL, nats", "same token"], rows)]
    return "\n".join(pages)


def coding_rows(records):
    """(bytes of a head, KL, its name, run, rank) of all codings, the smallest first.

    The full state and rank 0 are the same in all runs, and are there once.
    """
    rows, runs = [], codings(records)
    for record in runs:
        V, K = record["state"]
        made = record["arguments"]
        if record is runs[0]:
            rows.append((4 * V * K, 0.0, "untouched, in float32", record, "full"))
        for rank in ranks_of(record):
            name = f"{made['store']}, {rank} {made['keep']} modes"
            if rank == min(V, K):
                name = f"{made['store']}, whole state"
            if rank == 0:
                name = "nothing carried"
            if rank > 0 or record is runs[0]:
                kl = values(record, "kl", rank).mean()
                rows.append((record["bytes"][str(rank)], kl, name, record, rank))
    return sorted(rows, key=lambda row: row[:2])


def on_front(row, rows):
    """Whether no other coding is as small and as close, and not equal."""
    for size, kl, *_ in rows:
        if size <= row[0] and kl <= row[1] and (size, kl) != row[:2]:
            return False
    return True


def coding_table(models):
    """By model, the whole state in every store and what is on the front, sorted by bytes."""
    pages = []
    for name, records in models.items():
        rows = coding_rows(records)
        lines = []
        for row in rows:
            size, kl, coding, record, rank = row
            front = "yes" if on_front(row, rows) else ""
            if rank == "full":
                lines.append([f"{size:,}", coding, "0", "0", "100%", front])
            elif front or rank == min(record["state"]):
                change, divergence, agree = effects(record, rank)
                lines.append([f"{size:,}", coding, divergence, change, agree, front])
        if lines:
            head = ["bytes a head", "stored", "KL, nats", "change in loss, nats", "same token",
                    "on the front"]
            pages += [f"**{escaped(name)}**: {escaped(counted(codings(records)[0]))}\n",
                      table(head, lines)]
    return "\n".join(pages)


def task_table(models):
    """Score of the full state, and by rank the change, with the samples better and worse."""
    runs = [(name, record) for name in models for record in find(models[name], "04_ruler")]
    if not runs:
        return ""
    ranks, rows = ranks_of(*(record for _, record in runs)), []
    for name, record in runs:
        row = [name, setting(record), counted(record),
               f"{values(record, 'scores', 'full').mean():.1f}"]
        for rank in ranks:
            cell = ""
            if rank in ranks_of(record):
                change = changes(record, "scores", rank)
                cell = gdn.with_error(change)
                if change.any():
                    cell += f", {(change > 0).sum()} up {(change < 0).sum()} down"
            row.append(cell)
        rows.append(row)
    return table(["model", "task", "over", "full state", *(f"rank {rank}" for rank in ranks)], rows)


def head_table(models):
    """Of the states: means over heads and boundaries, ± standard error over documents."""
    rows = []
    for name, records in models.items():
        for record in first(records, "01_spectrum"):
            rank, heads = near_12(record), values(record, "effective_rank").mean((0, 1))
            means = [values(record, "effective_rank").mean((1, 2, 3)),
                     values(record, "effective_rank_null").mean((1, 2, 3))]
            for key in ("energy", "readout", "overlap"):
                means.append(values(record, key, rank).mean((1, 2)))
            later = {**record, "items": record["items"][1:]}        # the first has no other
            if later["items"]:
                means.append(values(later, "overlap_other", rank).mean((1, 2)))
            else:
                means.append([])
            rows.append([name, counted(record),
                         f"{heads.min():.1f}, {np.median(heads):.1f}, {heads.max():.1f} of "
                         f"{min(record['state'])}", rank,
                         *(level(mean) if len(mean) else "" for mean in means)])
    head = ["model", "over", "effective rank: least, median, most of the heads", "r",
            "effective rank", "with random keys", "energy in the top r", "of what is read",
            "overlap with the boundary before", "with another document"]
    return table(head, rows) if rows else ""


def finding(records):
    """What was found on a model, in one line."""
    words = []
    for record in first(records, "03_loss"):
        rank, n = near_12(record), len(record["items"])
        change, other = changes(record, "loss", rank), 1 - values(record, "agree", rank).mean()
        words.append(f"with {rank} of {min(record['state'])} modes ({named(record)}) the loss "
                     f"changes by {gdn.with_error(change)} nats{share(record, rank)}, and "
                     f"{other:.1%} of the most likely tokens are others ({n} "
                     f"document{'s' * (n > 1)})")
    close = [row for row in coding_rows(records) if row[1] <= 0.001]
    if close and len(codings(records)) > 1:
        size, kl, coding, *_ = close[0]
        words.append(f"the smallest coding with a KL of at most 0.001 is {coding}: {size:,} bytes "
                     f"a head (KL {kl:.1e})")
    if find(records, "02_decay"):
        words.append(f"{long_heads(records)} heads have a horizon over 4,096 tokens, "
                     f"{short_heads(records)} one of at most 256")
    runs = [record for record in find(records, "04_ruler") if not variant(record)]
    moved = []
    for record in runs:
        rank = near_12(record)
        mean, error = gdn.mean_se(changes(record, "scores", rank))
        if error and abs(mean) > 2 * error:
            moved.append(f"{setting(record)} by {mean:+.0f} points")
        if mean and not error:
            moved.append(f"{setting(record)} by {mean:+.0f} points in all of its "
                         f"{len(record['items'])}")
    if runs:
        words.append(f"{near_12(runs[0])} modes move {len(moved)} of {len(runs)} scores (a task at "
                     "a length each) by over two standard errors, where samples differ"
                     + ": " * bool(moved) + ", ".join(moved))
    return "; ".join(words)


def run_line(record):
    """What a run was, on what, and how long it took."""
    made, environment = record["arguments"], record["environment"]
    total = sum(item["seconds"]["total"] for item in record["items"])
    cutting = sum(item["seconds"]["truncate"] for item in record["items"])
    seed = ""
    if record["script"] == "04_ruler" and not made["data"]:
        seed = f", seed {made['seed']}"
    return escaped(f"{record['file']}: {counted(record)}{seed}, segment {made['segment']}, "
                   f"{environment['dtype']} on {environment['device']}; {total:.0f} s, of these "
                   f"{cutting:.0f} at boundaries")


INTRODUCTION = (
    "Truncated states grow to full rank again between boundaries, and attention layers keep all "
    "they saw: this measures what a model depends on, not a saving of memory or time. All numbers "
    'were measured in the runs listed at the end, except the column "the post says".\n')
CLAIMS_NOTE = (
    "The post measured Qwen3.5-0.8B on 8 web texts of up to 16K tokens, and on 50 to 200 prompts a "
    'task of RULER\'s own. It leaves open what a horizon is, when a head has "largely forgotten", '
    "and over what an effective rank is averaged; the README says how they are read here. Where "
    "the scope differs, a figure is no check of the post's:\n")
CODINGS_NOTE = (
    "The whole state in every store, and what is on the front: no other coding on the same "
    "documents is as small and as close. Bytes are those of one head, scales counted.\n")


def main(*, model: str = None, results: str = "results"):
    """Write report.md and its figures from the result files.

    Args:
        model: the model to report; by default all that are in the folder.
        results: the folder that stages 01 to 04 wrote to.
    """
    root = Path(results)
    names = sorted(path.name for path in root.glob("*") if path.is_dir())
    if model:
        names = [model if model in names else Path(gdn.find_model(model)[0]).name]
    read = {name: read_model(root / name) for name in names}
    models = {name: records for name, (records, _) in read.items() if records}
    problems = [problem for _, missing in read.values() for problem in missing]
    if not models:
        raise gdn.Error(f"--results {results} holds no result file of "
                        f"{', '.join(names) or 'a model'} to report: run 01 to 04 first. "
                        f"{'; '.join(problems)}")
    figures = {}
    for panel, *select in FIGURES:
        figures[panel] = draw(root, models, panel, *select)
    page = ["# How much of the Gated DeltaNet state do these models depend on?\n"]
    for name, records in models.items():
        page.append(f"- **{escaped(name)}**: {escaped(finding(records))}.")
    page += ["", INTRODUCTION]
    if problems:
        page += ["Not in this report:\n", *(f"- {escaped(problem)}" for problem in problems), ""]
    claims = []
    for claim, said, cell, *arguments in CLAIMS:
        cells = [cell(records, *arguments) or "not run" for records in models.values()]
        claims.append([claim, said, *cells])
    page += ["## The post's claims\n", table(["claim", "the post says", *models], claims),
             CLAIMS_NOTE]
    page += [f"- {escaped(name)}: {escaped(differences(models[name]))}" for name in models]
    for title, *parts in (
            ("Next-token loss", loss_tables(models), figures[loss_panel], figures[kl_panel],
             figures[after_panel]),
            ("What a byte of the state buys", CODINGS_NOTE, coding_table(models),
             figures[bytes_panel]),
            ("Tasks", task_table(models), figures[tasks_panel], figures[lengths_panel]),
            ("Heads", head_table(models), figures[horizon_panel], figures[along_panel],
             figures[readout_panel], figures[spectra_panel])):
        page += [f"\n## {title}\n", *parts]
    page.append("\n## Runs\n")
    for name, records in models.items():
        made = records[0]
        page.append(escaped(f"- {name} ({made['model']}; torch {made['environment']['torch']}, "
                            f"transformers {made['environment']['transformers']})"))
        page += [f"    - {run_line(record)}" for record in records]
    text = "\n".join(page) + "\n"
    gdn.write_whole(root / "report.md", lambda path: path.write_text(text, encoding="utf-8"))
    print(root / "report.md")


if __name__ == "__main__":
    gdn.command(main)

"""The report: what stages 01 to 04 found, for every model in the results, and what the post says.

    python 05_report.py                             # writes results/report.md and its figures
    python 05_report.py --model Qwen/Qwen3.5-0.8B   # of that model alone, into its folder there

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

PLAIN = {key: gdn.DEFAULTS[key] for key in ("heads", "keep", "store")}


def read_model(folder):
    """The result files of a model, [record], defaults first, and what is to be said of them."""
    records, problems = [], []
    for path in sorted(folder.glob("**/*.json")):
        try:
            record = gdn.read_results(path)
        except gdn.Error as error:
            problems.append(str(error))
            continue
        record = {**record["arguments"], **record, "file": path.relative_to(folder).as_posix()}
        if len(record["items"]) < asked(record):
            problems.append(f"{folder.name}/{record['file']}: {counted(record)}")
        if record["items"]:
            records.append(record)
    records.sort(key=lambda run: (run["script"], variant(run), run.get("length", 0)))
    for script in ("01_spectrum", "02_decay", "03_loss", "04_ruler"):
        if not find(records, script):
            problems.append(f"{script} has not run on {folder.name}")
    sources = {record["documents"] for record in records if "documents" in record}
    weights = {record["environment"]["weights"] for record in records}
    for key, found in (("weights", weights), ("documents", sources)):
        if len(found) > 1:
            problems.append(f"{folder.name} has results of different {key}: "
                            f"{', '.join(sorted(found))}")
    return records, problems


def find(records, script, **arguments):
    """The runs of a stage with these arguments, as far as it has them; the default run first."""
    found = []
    for record in records:
        made = {**arguments, **record}
        if record["script"] == script and all(made[key] == arguments[key] for key in arguments):
            found.append(record)
    return found


def first(records, *scripts):
    """The first run of each of these stages, [] if one has not run."""
    found = [record for script in scripts for record in find(records, script)[:1]]
    return found if len(found) == len(scripts) else []


def codings(records):
    """The runs of all heads at the default boundaries, whatever is kept and however stored."""
    return find(records, "03_loss", heads="all", segment=256)


def by_rank(records):
    """The runs that are shown by rank: those in float32, and those that are not among codings."""
    return [record for record in find(records, "03_loss")
            if record["store"] == "float32" or record not in codings(records)]


def variant(record):
    """In what a run differs from the default: '' or 'heads over-256 (2 of 12), keep random'."""
    words = []
    for key, default in gdn.DEFAULTS.items():
        value = record.get(key, default)
        if value != default:
            words.append(f"{key} {Path(value).name if key == 'data' else value}")
            if key == "heads":
                words[-1] += " ({} of {})".format(*record["heads_cut"])
    return ", ".join(words)


def asked(record):
    """How many documents or samples a run was to have."""
    return record["samples" if record["script"] == "04_ruler" else "docs"]


def counted(record):
    """What a mean is over: '8 documents of 4,096 tokens', '3 of 25 samples, unfinished'."""
    n, all_there = len(record["items"]), len(record["items"]) >= asked(record)
    thing = "sample" if record["script"] == "04_ruler" else "document"
    words = f"{n} {thing}{'s' * (n != 1)}" if all_there else f"{n} of {asked(record)} {thing}s"
    if thing == "document":
        words += f" of {record['tokens']:,} tokens"
    return words if all_there else f"{words}, unfinished"


def described(record):
    plain = "all heads, top modes" if "keep" in record else "all heads"
    return f"{variant(record) or plain}; {counted(record)}"


def values(record, key, rank=None):
    """One measured thing of every document or sample, [items, ...]; at a rank if it has ranks."""
    items = record["items"]
    return np.array([item[key] if rank is None else item[key][str(rank)] for item in items])


def changes(record, key, rank):
    """By document or sample, the value at a rank less that of the untouched model: [items, ...]."""
    change = values(record, key, rank) - values(record, key, "full")
    return np.round(change, 12)                     # where all change alike, they do so exactly


def ranks_of(*records):
    ranks = {rank for record in records for rank in record["ranks"]}
    return sorted(ranks, reverse=True)


def near_12(record):
    """The rank that is spoken of where only one can be."""
    return min(ranks_of(record), key=lambda rank: abs(rank - 12))


def horizons(record):
    """Decay horizons of every head, [L, H], from the mean log a of all documents."""
    return gdn.decay_horizon(values(record, "log_a").mean(0)).numpy()


# ---- the post's claims --------------------------------------------------------------------------
#
# The post names neither its web text nor the length of its documents, only that they go up to 16K
# tokens: C4 and 16,384 tokens stand for them. Of the multikey tasks we take niah_multikey_2.

POST = {"documents": "c4", "docs": 8, "tokens": 16384, "segment": 256}
LENGTHS = (16384, 65536, 131072)


def is_the_posts(record):
    """Whether the model is the hub's Qwen3.5-0.8B or -Base, or a folder of that name and states."""
    model = record["model"]
    if os.path.isabs(model):
        model = f"Qwen/{Path(model).name}"
    return (model in ("Qwen/Qwen3.5-0.8B", "Qwen/Qwen3.5-0.8B-Base")
            and len(record["layers"]) == 18 and record["state"] == [128, 128])


def differences(records):
    """In what the runs that the claims rest on differ from the post's, stage by stage."""
    words = [] if is_the_posts(records[0]) else ["another model"]
    for script in ("01_spectrum", "02_decay", "03_loss"):
        for record in find(records, script, **PLAIN)[:1]:
            made = {**record, "docs": len(record["items"])}
            off = [f"--{key} {made[key]}" for key in POST if made[key] != POST[key]]
            words.append(f"{script}: {', '.join(off) or 'same scope'}")
    runs = find(records, "04_ruler", **PLAIN)
    if runs:
        fewest = min(len(record["items"]) for record in runs)
        lengths = sorted({record["length"] for record in runs} - set(LENGTHS))
        off = {f"lengths {', '.join(map(str, lengths))}": lengths,
               f"samples from {fewest}": fewest < 50,
               "our wording, not RULER's": not all(record["data"] for record in runs),
               "another segment": any(record["segment"] != 256 for record in runs)}
        off = [difference for difference, is_so in off.items() if is_so]
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
        words = (f"{heads[long].min():.0f} to {heads[long].max():.0f}, in {fewer[long].sum()} of "
                 f"{long.sum()} less than random keys give")
    return f"{words}; of all heads {fewer.sum()} of {fewer.size} have less than random keys give"


def loss_at(records, rank):
    for record in find(records, "03_loss", **PLAIN)[:1]:
        if rank in ranks_of(record):
            return f"{gdn.with_error(changes(record, 'loss', rank))} nats ({described(record)})"


def task_at(records, task, lengths, ranks):
    """A line for each run at the post's lengths; if there is none, for each at others."""
    runs, lines = find(records, "04_ruler", task=task, **PLAIN), []
    at_the_posts = [record for record in runs if record["length"] in lengths]
    for record in at_the_posts or runs:
        words = [f"full state {values(record, 'scores', 'full').mean():.0f}"]
        for rank in ranks:
            if rank in ranks_of(record):
                words.append(f"rank {rank} {gdn.with_error(changes(record, 'scores', rank))}")
        length = f"{record['length']:,} tokens"
        lines.append(f"{length} ({described(record)}): {', '.join(words)}")
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

def layer_looks(layers):
    """The look of every layer's marks: a colour along a scale, and a legend for a few."""
    for i, layer in enumerate(layers):
        shown = len(layers) <= 7 or i in (0, len(layers) - 1)
        yield {"color": plt.cm.viridis(0.9 * i / max(len(layers) - 1, 1)), "linestyle": "",
               "marker": MARKERS[i % 7], "label": f"layer {layer}" if shown else None}


def error_bars(ax, x, rows, i, label, **looks):
    """Means of the rows [points][items] with their standard errors, in the i-th colour."""
    means, errors = zip(*(gdn.mean_se(row) for row in rows))
    looks = {"color": COLOURS[i % 7], "marker": MARKERS[i % 7], "linestyle": LINES[i // 7 % 4],
             **looks}
    ax.errorbar(x, means, [error or 0 for error in errors], capsize=3,
                label=label.replace("$", r"\$"), **looks)            # $ would be a formula


def steps(ax, names, label):
    """An x axis with a step for each name, however few there are."""
    ax.set_xticks(range(len(names)), names)
    ax.set(xlabel=label, xlim=(-0.5, len(names) - 0.5))


def beside(i, n):
    """How far the i-th of n curves stands from its steps, so that equal ones are seen: all stand
    within a third of a step."""
    return min(0.06, 0.3 / n) * (i - (n - 1) / 2)


def rank_curves(ax, runs, labels, measure, key):
    """measure(record, key, rank) [items] of every run by rank, the largest to the left."""
    ranks = ranks_of(*runs)
    for i, record in enumerate(runs):
        x = [ranks.index(rank) + beside(i, len(runs)) for rank in ranks_of(record)]
        error_bars(ax, x, [measure(record, key, rank) for rank in ranks_of(record)], i, labels[i])
    steps(ax, [str(rank) for rank in ranks], "modes kept per head, r")


def change_axis(ax, label, least):
    """A y axis that shows at least this much: nothing looks like much that is not."""
    ax.axhline(0, color="grey", linewidth=1)
    ax.update_datalim([(0, -0.1 * least), (0, least)])
    ax.autoscale_view()
    ax.set_ylabel(label)


def loss_panel(ax, runs):
    """Change in next-token loss, mean ± standard error over documents."""
    rank_curves(ax, runs, [described(record) for record in runs], changes, "loss")
    ax.set_yscale("symlog", linthresh=0.01)
    change_axis(ax, "change in loss, nats (linear up to 0.01)", 0.01)
    powers = [x * 10.0 ** n for n in (-2, -1, 0) for x in (1, 3)]
    ticks = [-x for x in powers] + [-0.005, 0, 0.005] + powers
    ax.yaxis.set_major_locator(matplotlib.ticker.FixedLocator(ticks))
    ax.yaxis.set_major_formatter("{x:g}")


def kl_panel(ax, runs):
    """KL divergence from the untouched model, mean ± standard error over documents."""
    rank_curves(ax, runs, [described(record) for record in runs], values, "kl")
    ax.set_ylabel("KL from the untouched model, nats")


def after_panel(ax, runs):
    """Change in loss by the tokens read since the last boundary, mean ± standard error."""
    [record] = runs
    edges, shown, names = record["after_bins"], ranks_of(record), ["first\nsegment"]
    for low, high, n in zip(edges, edges[1:], record["after_counts"][1:]):
        if n:                                           # short documents do not reach the last ones
            names.append(f"{low}" if high == low + 1 else f"{low}-{high - 1}")
    if len(shown) > 6:
        shown = [rank for rank in shown if rank in (32, 12, 4, 1, 0)] or shown[:6]
    for i, rank in enumerate(shown):
        rows = changes(record, "after", rank).T                                 # [bins, documents]
        error_bars(ax, range(len(names)), rows, i, f"rank {rank}")
    steps(ax, names, "tokens since the boundary")
    change_axis(ax, "change in loss, nats", 0.01)


def bytes_panel(ax, runs):
    """KL against the bytes carried of a head: a colour a way of storing, dashes the modes kept, \
stars whole states; mean ± standard error over documents."""
    stores = sorted({record["store"] for record in runs})
    keeps = sorted({record["keep"] for record in runs}, reverse=True)       # top first
    for record in runs:
        points = {}                                                 # by whether the state is whole
        for rank in ranks_of(record):
            point = record["bytes"][str(rank)], values(record, "kl", rank)
            points.setdefault(rank == min(record["state"]), []).append(point)
        label = f"{record['store']}, {record['keep']} modes; {counted(record)}"
        for is_whole, found in points.items():
            looks = {"marker": "*", "markersize": 14, "markeredgecolor": "black"}
            error_bars(ax, *zip(*found), stores.index(record["store"]),
                       "_nolegend_" if is_whole and len(points) == 2 else label,
                       linestyle=LINES[keeps.index(record["keep"])], **(looks if is_whole else {}))
    sizes = [size for record in runs for size in record["bytes"].values() if size] or [1]
    least = 4.0 ** (np.log2(min(sizes)) // 2)
    ax.set_xscale("symlog", base=4, linthresh=least, linscale=0.5)  # linear from 0 to there
    ax.xaxis.set_major_formatter("{x:,.0f}")
    ax.set(xlabel="bytes carried per head", ylabel="KL from the untouched model, nats")


def tasks_panel(ax, runs):
    """Change in task score, mean ± standard error over samples."""
    labels = [f"{record['task']}, {counted(record)}; full state "
              f"{values(record, 'scores', 'full').mean():.0f}" for record in runs]
    rank_curves(ax, runs, labels, changes, "scores")
    change_axis(ax, "change in score, points", 1)


def lengths_panel(ax, runs):
    """Task score against length, mean ± standard error over samples."""
    shared = [rank for rank in ranks_of(*runs) if all(rank in ranks_of(record) for record in runs)]
    for i, rank in enumerate(["full", *shared]):
        x = np.arange(len(runs)) + beside(i, 1 + len(shared))
        rows = [values(record, "scores", rank) for record in runs]
        error_bars(ax, x, rows, i, "full state" if i == 0 else f"rank {rank}")
    names = [f"{record['length']:,}\n({counted(record)})" for record in runs]
    steps(ax, [name.replace(", unf", ",\nunf") for name in names], "length, tokens")
    ax.set(ylim=(-5, 105), ylabel="score, points")


def horizon_panel(ax, runs):
    """Effective rank against decay horizon, a filled mark a head; the hollow mark joined to it is \
what random keys would give. Dotted: 256 and 4,096 tokens; line: all modes."""
    record, decay = runs
    x, y = horizons(decay), values(record, "effective_rank").mean((0, 1))           # [L, H]
    null = values(record, "effective_rank_null").mean((0, 1))
    for i, looks in enumerate(layer_looks(record["layers"])):
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
    x, effective = record["items"][0]["positions"], values(record, "effective_rank").mean(0)
    for i, (chosen, label) in enumerate(((horizons(decay) > 256, "over 256"),
                                         (horizons(decay) <= 256, "at most 256"))):
        if chosen.any():
            heads = effective[:, chosen]                                        # [boundary, heads]
            ax.plot(x, heads.mean(1), color=COLOURS[i], marker=MARKERS[i], markersize=4,
                    label=f"horizon {label} tokens (heads: {chosen.sum()})")
            low, high = np.quantile(heads, (0.25, 0.75), axis=1)
            ax.fill_between(x, low, high, color=COLOURS[i], alpha=0.15)
    ax.update_datalim([(x[0], 0)])
    ax.set(xlabel="tokens read", ylabel="effective rank")


def readout_panel(ax, runs):
    """What is read of the tail against its energy, a mark a head; on the line, as much."""
    [record] = runs
    rank = near_12(record)
    x = np.clip(1 - values(record, "energy", rank).mean(0), 1e-14, 1)                # [L, H]
    y = np.clip(1 - values(record, "readout", rank).mean(0), 1e-14, 1)
    for i, looks in enumerate(layer_looks(record["layers"])):
        ax.plot(x[i], y[i], **looks)
    line = [min(x.min(), y.min(), 0.1), 1]
    ax.plot(line, line, color="grey", linewidth=1)
    ax.set(xscale="log", xlabel=f"share of energy beyond {rank} modes",
           yscale="log", ylabel="share of what is read beyond them")


def spectra_panel(ax, runs):
    """Singular values over their sum, mean over boundaries and documents, a line a head."""
    [record] = runs
    spectrum = values(record, "spectrum").mean(0)                                   # [L, H, M]
    for heads, looks in zip(spectrum, layer_looks(record["layers"])):
        lines = ax.plot(range(1, heads.shape[-1] + 1), heads.T, color=looks["color"], linewidth=1)
        lines[0].set_label(looks["label"])
    ax.set(xlabel="mode j", yscale="log", ylim=(1e-6, 1), ylabel="singular value / sum of them")


FIGURES = [(loss_panel, by_rank), (kl_panel, by_rank), (after_panel, first, "03_loss"),
           (bytes_panel, codings), (tasks_panel, find, "04_ruler"),
           (lengths_panel, find, "04_ruler"), (horizon_panel, first, "01_spectrum", "02_decay"),
           (along_panel, first, "01_spectrum", "02_decay"),
           (readout_panel, first, "01_spectrum"), (spectra_panel, first, "01_spectrum")]


def panels(models, panel, select, *arguments):
    """{title: runs}: a panel for each model, or for each of its variants and lengths or tasks."""
    groups = {}
    for name, records in models.items():
        runs = select(records, *arguments)
        for record in runs:
            title = name
            if panel is tasks_panel:
                title = f"{name}, {record['length']:,} tokens\n{variant(record)}"
            if panel is lengths_panel:
                title = f"{name}, {record['task']}\n{variant(record)}"
            if select is first:
                title = "\n".join(dict.fromkeys([name, *(described(run) for run in runs)]))
            groups.setdefault(title.strip(), []).append(record)
    if panel is lengths_panel:
        groups = {title: runs for title, runs in groups.items() if len(runs) > 1}
    return groups


def whole_decades(axes):
    """One logarithmic y axis for all means; linear below its first decade, so that 0 is seen."""
    means = np.concatenate([bars[0].get_ydata() for ax in axes for bars in ax.containers])
    above = means[means > 0] if means.any() else np.array([1e-9])
    low = 10.0 ** np.floor(np.log10(above.min() / 1.1))
    high = 10.0 ** np.ceil(np.log10(above.max() * 1.1))
    for ax in axes:
        ax.set(yscale="log", ylim=(low, high))
        if (means == 0).any():
            ax.set_yscale("symlog", linthresh=low, linscale=0.5)
            ax.set(ylim=(-low / 4, high), ylabel=f"KL, nats (linear up to {low:.0e})")


def draw(to, models, panel, *select):
    """Write a figure, at most three panels a row, and return the page's lines for it."""
    groups, name, caption = panels(models, panel, *select), panel.__name__[:-6], panel.__doc__
    if not groups:
        return ""
    columns, longest = min(len(groups), 3), max(map(len, groups.values()))
    rows = -(-len(groups) // columns)
    size = (4.8 * max(columns, 1.3), rows * (4.6 + 0.18 * longest))
    figure, axes = plt.subplots(rows, columns, figsize=size, squeeze=False, sharey=True)
    for ax in axes.flat[len(groups):]:
        ax.remove()
    axes = axes.flat[:len(groups)]
    for ax, (title, runs) in zip(axes, groups.items()):
        panel(ax, runs)
        lines = [textwrap.fill(line, 50) for line in title.split("\n")]
        ax.set_title("\n".join(lines), parse_math=False, fontsize=10)
        words = ax.get_legend_handles_labels()[1]
        ax.legend(fontsize=9, loc="upper center", bbox_to_anchor=(0.5, -0.24),
                  ncol=2 if max(map(len, words)) < 34 else 1)
    if panel in (kl_panel, bytes_panel):
        whole_decades(axes)
    for ax in axes:
        ax.set_ylabel(ax.get_ylabel() if ax.get_subplotspec().is_first_col() else "")
    gdn.write_whole(to / f"{name}.png", lambda path: figure.savefig(path, format="png"))
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


def level(numbers):
    """A mean that is no change, with its standard error."""
    return gdn.with_error(numbers).removeprefix("+")


def effects(record, rank):
    """Change in loss, also as a share of what wiping the states costs; KL; agreement."""
    change = changes(record, "loss", rank)
    words = gdn.with_error(change)
    if rank and 0 in ranks_of(record) and changes(record, "loss", 0).mean() > 0:
        part = round(change.mean() / changes(record, "loss", 0).mean(), 2) + 0.0        # no -0%
        words += f" ({part:.0%} of rank 0)"
    return [words, level(values(record, "kl", rank)), f"{values(record, 'agree', rank).mean():.1%}"]


def loss_tables(models):
    """A table a run, a row a rank."""
    for name, records in models.items():
        for record in by_rank(records):
            rows = [["full", f"{values(record, 'loss', 'full').mean():.4f} nats", "", ""]]
            rows += [[rank, *effects(record, rank)] for rank in ranks_of(record)]
            yield f"**{escaped(name)}**: {escaped(described(record))}\n"
            yield table(["rank", "change in loss, nats", "KL, nats", "same token"], rows)


def coding_rows(records):
    """(bytes of a head, KL, what is stored, run, rank, whether on the front), the smallest first.

    What is alike in several runs on as many documents (nothing, a whole state) is there once. On
    the front is what is closer than all that is smaller, on as many documents.
    """
    rows, found, closest = {}, [], {}
    for record in codings(records):
        (V, K), store, over = record["state"], record["store"], counted(record)
        rows.setdefault(("full", over), (4 * V * K, 0.0, "untouched, float32", record, "full"))
        names = {0: "nothing", min(V, K): f"{store}, whole state"}
        for rank in ranks_of(record):
            name = names.get(rank, f"{store}, {rank} {record['keep']} modes")
            row = record["bytes"][str(rank)], values(record, "kl", rank).mean(), name, record, rank
            rows.setdefault((name, over), row)
    for row in sorted(rows.values(), key=lambda row: row[:2]):
        kl, over = row[1], counted(row[3])
        found.append((*row, kl < closest.get(over, np.inf)))
        closest[over] = min(kl, closest.get(over, np.inf))
    return found


def coding_tables(models):
    for name, records in models.items():
        rows, lines = coding_rows(records), []
        for size, _, stored, record, rank, best in rows:
            front = "front" if best else ""
            if len(rows) <= 24 or front or rank == min(record["state"]):
                change, kl, same = ["0", "0", "100%"] if rank == "full" else effects(record, rank)
                lines.append([f"{size:,}", stored, kl, change, same, front, counted(record)])
        if rows:
            yield f"**{escaped(name)}**: {len(lines)} of {len(rows)} codings\n"
            yield table(["bytes a head", "stored", "KL, nats", "change in loss, nats", "same token",
                         "front", "over"], lines)


def task_table(models):
    """Score of the full state, and by rank the change, with the samples better and worse."""
    runs = [(name, record) for name in models for record in find(models[name], "04_ruler")]
    ranks, rows = ranks_of(*(record for _, record in runs)), []
    for name, record in runs:
        row = [name, record["task"], f"{record['length']:,}",
               described(record), f"{values(record, 'scores', 'full').mean():.1f}"]
        for rank in ranks:
            row.append("")
            if rank in ranks_of(record):
                change = changes(record, "scores", rank)
                row[-1] = gdn.with_error(change)
                if change.any():
                    row[-1] += f", {(change > 0).sum()} up {(change < 0).sum()} down"
        rows.append(row)
    if rows:
        yield table(["model", "task", "length", "truncated", "full state",
                     *(f"rank {rank}" for rank in ranks)], rows)


def head_table(models):
    """Of the states: means over heads and boundaries, ± standard error over documents."""
    rows = []
    for name, records in models.items():
        for record in find(records, "01_spectrum"):
            rank, heads = near_12(record), values(record, "effective_rank").mean((0, 1))
            row = [name, described(record), f"{heads.min():.1f}, {np.median(heads):.1f}, "
                   f"{heads.max():.1f} of {min(record['state'])}"]
            for key in ("effective_rank", "effective_rank_null"):
                row.append(level(values(record, key).mean((1, 2, 3))))
            row.append(rank)
            for key in ("energy", "readout", "overlap"):
                row.append(level(values(record, key, rank).mean((1, 2))))
            later = {**record, "items": record["items"][1:]}        # the first has no other
            other = later["items"] and level(values(later, "overlap_other", rank).mean((1, 2)))
            rows.append([*row, other or ""])
    if rows:
        yield table(["model", "over", "effective rank: least, median, most of the heads", "mean",
                     "with random keys", "r", "energy in the top r", "of what is read",
                     "overlap with the boundary before", "with another document"], rows)


def task_finding(runs, rank):
    """Which scores a rank moves; of standard errors it speaks only where samples differ."""
    moved, differ = [], False
    for record in runs:
        change = changes(record, "scores", rank)
        mean, error = gdn.mean_se(change)
        differ = differ or bool(error)
        if abs(mean) > 2 * (error or 0):
            moved.append(f"{record['task']} at {record['length']:,} {gdn.with_error(change)}")
    by = " (by over two standard errors where samples differ)" if differ else ""
    return (f"{rank} modes move {len(moved)} of {len(runs)} scores{by}, each of a task at a length "
            f"and of {min(len(record['items']) for record in runs)} or more samples"
            + ": in points, " * bool(moved) + ", ".join(moved))


def finding(records):
    """What was found on a model, in one line."""
    words = []
    for record in first(records, "03_loss"):
        rank = near_12(record)
        change, _, same = effects(record, rank)
        words.append(f"with {rank} of {min(record['state'])} modes ({described(record)}) the loss "
                     f"in nats changes by {change}, and {same} of the most likely tokens stay")
    close = [row for row in coding_rows(records) if row[1] <= 0.001]
    if close:
        size, kl, stored, record, *_ = close[0]
        words.append(f"the smallest coding with a KL of at most 0.001 nats is {stored}: {size:,} "
                     f"bytes a head, KL {kl:.2g} ({counted(record)})")
    if find(records, "02_decay"):
        words.append(f"{long_heads(records)} heads have a horizon over 4,096 tokens, "
                     f"{short_heads(records)} one of at most 256")
    runs = [record for record in find(records, "04_ruler") if not variant(record)]
    for rank in dict.fromkeys(near_12(record) for record in runs):
        words.append(task_finding([run for run in runs if near_12(run) == rank], rank))
    return "; ".join(words)


def run_line(record):
    """What a run was, on what, and how long it took."""
    environment = record["environment"]
    total, cutting = (sum(item["seconds"][key] for item in record["items"])
                      for key in ("total", "truncate"))
    source = record.get("documents") or record["data"]
    source = f"from {source}" if source else f"seed {record['seed']}"
    return (f"    - {record['file']}: {counted(record)}, {source}, segment {record['segment']}, "
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
    "What crosses a boundary, all heads, boundaries every 256 tokens; bytes of one head, scales "
    "counted. *front*: no other coding over as many documents is as small and as close, and better "
    "in one. Of more than 24 codings, only those on the front and whole states are listed.\n")


def main(*, model: str = None, results: str = "results"):
    """Write report.md and its figures from the result files.

    Args:
        model: the model to report, into its own folder of the results; by default all together.
        results: the folder that stages 01 to 04 wrote to.
    """
    root = Path(results)
    names = sorted(path.name for path in root.glob("[!.]*") if path.is_dir())
    if model:
        names = [model if model in names else Path(gdn.find_model(model)[0]).name]
    read = {name: read_model(root / name) for name in names}
    models = {name: records for name, (records, _) in read.items() if records}
    problems = [problem for _, found in read.values() for problem in found]
    if not models:
        raise gdn.Error(f"--results {results} holds no result file of "
                        f"{', '.join(names) or 'a model'} to report: run 01 to 04 first"
                        f"{'; '.join(['', *problems])}")
    figures = {}
    to = root / names[0] if model else root
    for panel, *select in FIGURES:
        figures[panel.__name__[:-6]] = draw(to, models, panel, *select)
    page = ["# How much of the Gated DeltaNet state do these models depend on?\n"]
    for name, records in models.items():
        page.append(f"- **{escaped(name)}**: {escaped(finding(records))}.")
    page += ["", INTRODUCTION]
    if problems:
        page.append("Missing, unfinished or mixed:\n")
        page += [f"- {escaped(problem)}" for problem in problems]
        page.append("")
    claims = []
    for claim, said, cell, *arguments in CLAIMS:
        cells = [cell(records, *arguments) or "not run" for records in models.values()]
        claims.append([claim, said, *cells])
    page += ["## The post's claims\n", table(["claim", "the post says", *models], claims),
             CLAIMS_NOTE]
    page += [f"- {escaped(name)}: {escaped(differences(models[name]))}" for name in models]
    for title, parts, names in (
            ("Next-token loss", loss_tables(models), ("loss", "kl", "after")),
            ("What a byte of the state buys", (CODINGS_NOTE, *coding_tables(models)), ("bytes",)),
            ("Tasks", task_table(models), ("tasks", "lengths")),
            ("Heads", head_table(models), ("horizon", "along", "readout", "spectra"))):
        page += [f"\n## {title}\n", *parts, *(figures[name] for name in names)]
    page.append("\n## Runs\n")
    for name, records in models.items():
        page.append(f"- {escaped(name)} ({escaped(records[0]['model'])})")
        page += [escaped(run_line(record)) for record in records]
    text = "\n".join(page) + "\n"
    gdn.write_whole(to / "report.md", lambda path: path.write_text(text, encoding="utf-8"))
    print(to / "report.md")


if __name__ == "__main__":
    gdn.command(main)

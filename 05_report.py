"""The report: what stages 01 to 04 found, for every model in the results, and what the post says.

    python 05_report.py                             # writes results/report.md and its figures
    python 05_report.py --model Qwen/Qwen3.5-0.8B   # of that model alone

What has not run, or cannot be read, is named.
"""
import os
from pathlib import Path

import matplotlib
matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np

import gdn

# Colours that colour-blind readers can tell apart (Okabe & Ito 2008).
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS = "osD^vPX"
plt.rcParams.update({"font.size": 11, "axes.spines.right": False, "axes.grid": True,
                     "grid.alpha": 0.25, "figure.constrained_layout.use": True, "savefig.dpi": 110})


# ---- reading ------------------------------------------------------------------------------------

def read_model(folder):
    """The result files of a model, [record], defaults first, and a list of what is not there."""
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
    records.sort(key=lambda record: (record["script"], variant(record) != "", record["file"]))
    for script in ("01_spectrum", "02_decay", "03_loss", "04_ruler"):
        if not find(records, script):
            problems.append(f"{script} has not run on {folder.name}")
    return records, problems


def find(records, script, **arguments):
    """The runs of a stage with these arguments, those with the default ones first."""
    found = []
    for record in records:
        made = record["arguments"]
        if record["script"] == script and all(made.get(key) == arguments[key] for key in arguments):
            found.append(record)
    return found


def variant(record):
    """In what a run differs from the default: '' or 'heads over-256 (2 of 12), random modes'."""
    arguments, words = record["arguments"], []
    if arguments.get("heads", "all") != "all":
        cut, every = record["heads_cut"]
        words.append(f"heads {arguments['heads']} ({cut} of {every})")
    if arguments.get("keep", "top") != "top":
        words.append(f"{arguments['keep']} modes")
    if arguments["segment"] != 256:
        words.append(f"segment {arguments['segment']}")
    if arguments.get("data"):
        words.append("RULER's prompts")
    return ", ".join(words)


def named(record):
    return variant(record) or "all heads, top modes"


def values(record, key, rank=None):
    """One measured thing of every document or sample, [items, ...]; at a rank if it has ranks."""
    items = record["items"]
    return np.array([item[key] if rank is None else item[key][str(rank)] for item in items])


def changes(record, key, rank):
    """By document or sample, the value at a rank less that of the untouched model: [items, ...]."""
    return values(record, key, rank) - values(record, key, "full")


def ranks_of(*records):
    ranks = {rank for record in records for rank in record["arguments"]["ranks"]}
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

POST = {"01_spectrum": {"documents": "c4", "docs": 8, "tokens": 16384, "segment": 256},
        "02_decay": {"documents": "c4", "docs": 8, "tokens": 16384},
        "03_loss": {"documents": "c4", "docs": 8, "tokens": 16384, "segment": 256}}
LENGTHS = (16384, 65536, 131072)


def is_the_posts(record):
    """Whether the model is the hub's Qwen3.5-0.8B or -Base, or a folder of that name and shape."""
    model, shape = record["model"], {"layers": 24, "hidden": 1024, "heads": 16}
    if os.path.isabs(model):
        model = f"Qwen/{Path(model).name}"
    return (model in ("Qwen/Qwen3.5-0.8B", "Qwen/Qwen3.5-0.8B-Base") and record["shape"] == shape
            and len(record["layers"]) == 18 and record["state"] == [128, 128])


def differences(records):
    """In what a model's runs differ from the post's, stage by stage."""
    words = [] if is_the_posts(records[0]) else ["another model"]
    for script, wanted in POST.items():
        for record in find(records, script)[:1]:
            made = {**record["arguments"], "docs": len(record["items"])}
            off = [f"--{key} {made[key]}" for key in wanted if made[key] != wanted[key]]
            words.append(f"{script}: {', '.join(off) or 'same scope'}")
    tasks = find(records, "04_ruler", heads="all", keep="top")
    if tasks:
        off = []
        lengths = sorted({record["arguments"]["length"] for record in tasks})
        if not set(lengths) <= set(LENGTHS):
            off.append(f"lengths {', '.join(map(str, lengths))}")
        fewest = min(len(record["items"]) for record in tasks)
        if fewest < 50:
            off.append(f"{fewest} samples")
        if not all(record["arguments"]["data"] for record in tasks):
            off.append("our wording, not RULER's")
        if any(record["arguments"]["segment"] != 256 for record in tasks):
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
    for record, decay in zip(find(records, "01_spectrum"), find(records, "02_decay")):
        long = values(record, "effective_rank").mean((0, 1))[horizons(decay) > 4096]
        if not long.size:
            return "no such head"
        return f"{long.min():.0f} to {long.max():.0f} (heads: {long.size})"


def loss_at(rank):
    def cell(records):
        for record in find(records, "03_loss", heads="all", keep="top"):
            if rank in ranks_of(record):
                return f"{gdn.with_error(changes(record, 'loss', rank))} nats"
    return cell


def task_at(task, lengths, ranks):
    def cell(records):
        runs, lines = find(records, "04_ruler", task=task, heads="all", keep="top"), []
        at_the_posts = [record for record in runs if record["arguments"]["length"] in lengths]
        for record in at_the_posts or runs:
            words = [f"full state {values(record, 'scores', 'full').mean():.0f}"]
            for rank in ranks:
                if rank in ranks_of(record):
                    words.append(f"rank {rank} {gdn.with_error(changes(record, 'scores', rank))}")
            lines.append(f"{record['arguments']['length']:,} tokens: {', '.join(words)}")
        return "<br>".join(lines)
    return cell


CLAIMS = [  # the claim, what the post says, the cell of a model (None or "": not run)
    ("heads with a decay horizon over 4,096 tokens", "48 of 288", long_heads),
    ("heads that largely forget within 256 tokens: horizon at most 256", "61%", short_heads),
    ("effective rank of the heads with a horizon over 4,096", "30 to 47", rank_of_long_heads),
    ("change in loss, 48 modes kept", "-0.0001 ± 0.0010 nats", loss_at(48)),
    ("change in loss, 12 modes kept", "+0.005 nats", loss_at(12)),
    ("multikey needles, 32 and 12 modes kept", "at baseline with 32 at 16K, 64K and 128K; no "
     "measurable decline with 12", task_at("niah_multikey_2", LENGTHS, (32, 12))),
    ("frequent words (fwe), 32 and 12 modes kept", "no noticeable decline",
     task_at("fwe", LENGTHS, (32, 12))),
    ("variable tracking (vt) at 64K, 32 to 12 modes kept", "+8 to +19 points, errors 3 to 5",
     task_at("vt", (65536,), (32, 24, 16, 12))),
    ("common words (cwe) at 64K, 32 modes kept", "full state 27; -18 points",
     task_at("cwe", (65536,), (32,)))]


# ---- figures: each function fills the axes of one panel -----------------------------------------

def layer_styles(layers):
    """(i, style) of every layer: a few by colour and marker, many along a scale of colours."""
    few = len(layers) <= len(COLOURS)
    for i, layer in enumerate(layers):
        colour = COLOURS[i] if few else plt.cm.viridis(0.92 * i / (len(layers) - 1))
        shown = few or i in (0, len(layers) - 1)
        yield i, {"color": colour, "marker": MARKERS[i] if few else "o", "markersize": 6,
                  "label": f"layer {layer}" if shown else None}


def error_bars(ax, x, rows, i, label):
    """Means of the rows [points][items] with their standard errors."""
    means, errors = zip(*(gdn.mean_se(row) for row in rows))
    ax.errorbar(x, means, [error or 0 for error in errors], color=COLOURS[i % 7], label=label,
                marker=MARKERS[i % 7], linestyle="-" if i < 7 else "--", capsize=3)


def rank_panel(ax, runs, measure, label):
    """measure(record, rank) [items] of every run against its ranks, the largest to the left."""
    ranks = ranks_of(*runs)
    for i, record in enumerate(runs):
        x = [ranks.index(rank) + 0.06 * (i - len(runs) / 2) for rank in ranks_of(record)]
        error_bars(ax, x, [measure(record, rank) for rank in ranks_of(record)], i, label(record))
    ax.set_xticks(range(len(ranks)), [str(rank) for rank in ranks])
    ax.set_xlabel("modes kept per head, r")
    ax.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.15), ncol=2)
    return ranks


def loss_panel(ax, records):
    runs = find(records, "03_loss")
    V, K = runs[0]["state"]
    ranks = rank_panel(ax, runs, lambda record, rank: changes(record, "loss", rank), named)
    ax.axhline(0, color="grey", linewidth=1)
    ax.set_yscale("symlog", linthresh=0.01)
    ax.set_ylabel("change in loss, nats (linear up to 0.01)")
    size = ax.secondary_xaxis("top")
    sizes = [f"{rank * (K + V) / (K * V):.2g}" for rank in ranks]
    size.set_xticks(range(len(ranks)), sizes, fontsize=8)
    size.set_xlabel("numbers carried, r (K + V) / (K V)", fontsize=9)


def kl_panel(ax, records):
    rank_panel(ax, find(records, "03_loss"), lambda record, rank: values(record, "kl", rank), named)
    ax.set_yscale("log")
    ax.set_ylabel("KL from the untouched model, nats")


def tasks_panel(ax, runs):
    rank_panel(ax, runs, lambda record, rank: changes(record, "scores", rank), task_label)
    ax.axhline(0, color="grey", linewidth=1)
    ax.set_ylabel("change in score, points")


def task_label(record):
    return f"{record['arguments']['task']} (full {values(record, 'scores', 'full').mean():.0f})"


def after_panel(ax, records):
    record = find(records, "03_loss")[0]
    edges, shown = record["after_bins"], ranks_of(record)
    labels = ["first\nsegment"]
    for low, high in zip(edges, edges[1:]):
        labels.append(f"{low}" if high == low + 1 else f"{low}-{high - 1}")
    if len(shown) > 6:
        shown = [rank for rank in shown if rank in (32, 12, 4, 1, 0)]
    for i, rank in enumerate(shown):
        error_bars(ax, range(len(labels)), changes(record, "after", rank).T, i, f"rank {rank}")
    ax.set_xticks(range(len(labels)), labels, fontsize=8)
    ax.set_xlabel("tokens since the boundary")
    ax.set_ylabel("change in loss, nats")
    ax.legend(fontsize=9)


def lengths_panel(ax, runs):
    runs = sorted(runs, key=lambda record: record["arguments"]["length"])
    lengths = [record["arguments"]["length"] for record in runs]
    shared = [rank for rank in ranks_of(*runs) if all(rank in ranks_of(record) for record in runs)]
    for i, rank in enumerate(["full", *shared]):
        error_bars(ax, lengths, [values(record, "scores", rank) for record in runs], i,
                   "full state" if rank == "full" else f"rank {rank}")
    ax.set_xscale("log", base=2)
    ax.set_xticks(lengths, [f"{length:,}" for length in lengths])
    ax.minorticks_off()
    ax.set_xlabel("length, tokens")
    ax.set_ylabel("score, points")
    ax.legend(fontsize=8)


def horizon_panel(ax, records):
    [record, *_], [decay, *_] = find(records, "01_spectrum"), find(records, "02_decay")
    x, y = horizons(decay), values(record, "effective_rank").mean((0, 1))           # [L, H]
    for i, style in layer_styles(record["layers"]):
        ax.plot(x[i], y[i], linestyle="", **style)
    for limit in (256, 4096):
        ax.axvline(limit, color="grey", linestyle=":", linewidth=1)
    ax.set_xscale("log")
    ax.set_ylim(0, min(record["state"]))
    ax.set_xlabel("decay horizon, tokens")
    ax.set_ylabel("effective rank (top: all modes)")
    ax.legend(fontsize=9)


def along_panel(ax, records):
    [record, *_], [decay, *_] = find(records, "01_spectrum"), find(records, "02_decay")
    effective, long = values(record, "effective_rank").mean(0), horizons(decay) > 256
    for i, (chosen, label) in enumerate(((long, "over 256"), (~long, "at most 256"))):
        if chosen.any():
            heads, x = effective[:, chosen], record["items"][0]["positions"]    # [boundary, heads]
            ax.plot(x, heads.mean(1), color=COLOURS[i], marker=MARKERS[i], markersize=4,
                    label=f"horizon {label} tokens ({chosen.sum()} heads)")
            middle = np.quantile(heads, (0.25, 0.75), axis=1)
            ax.fill_between(x, *middle, color=COLOURS[i], alpha=0.15)
    ax.set_ylim(bottom=0)
    ax.set_xlabel("tokens read")
    ax.set_ylabel("effective rank")
    ax.legend(fontsize=9)


def readout_panel(ax, records):
    record = find(records, "01_spectrum")[0]
    rank = near_12(record)
    x = np.clip(1 - values(record, "energy", rank).mean(0), 1e-14, 1)                # [L, H]
    y = np.clip(1 - values(record, "readout", rank).mean(0), 1e-14, 1)
    for i, style in layer_styles(record["layers"]):
        ax.plot(x[i], y[i], linestyle="", **style)
    line = [min(x.min(), y.min()), 1]
    ax.plot(line, line, color="grey", linewidth=1)
    ax.set_xscale("log")
    ax.set_yscale("log")
    ax.set_xlabel(f"share of energy beyond {rank} modes")
    ax.set_ylabel(f"share of what is read beyond {rank}")
    ax.legend(fontsize=9)


def spectra_panel(ax, records):
    record = find(records, "01_spectrum")[0]
    spectrum = values(record, "spectrum").mean(0)                                   # [L, H, M]
    for i, style in layer_styles(record["layers"]):
        lines = ax.plot(range(1, spectrum.shape[-1] + 1), spectrum[i].T, color=style["color"],
                        linewidth=1)
        lines[0].set_label(style["label"])
    ax.set_yscale("log")
    ax.set_ylim(1e-6, 1)
    ax.set_xlabel("mode j")
    ax.set_ylabel("singular value / sum of them")
    ax.legend(fontsize=9)


def by_model(models, *scripts):
    """{title of a panel: records} of the models that have run these stages."""
    return {name: records for name, records in models.items()
            if all(find(records, script) for script in scripts)}


def by_variant(models):
    """A panel for each model and way of truncating, at the length that most of its tasks ran at."""
    groups = {}
    for name, records in models.items():
        for record in find(records, "04_ruler"):
            groups.setdefault((name, variant(record)), []).append(record)
    found = {}
    for (name, how), runs in groups.items():
        lengths = [record["arguments"]["length"] for record in runs]
        length = max(lengths, key=lengths.count)
        title = f"{name}, {length:,} tokens" + (f"\n{how}" if how else "")
        found[title] = find(runs, "04_ruler", length=length)
    return found


def by_task(models):
    """A panel for each model and task that ran at several lengths."""
    groups = {}
    for name, records in models.items():
        for record in find(records, "04_ruler"):
            if not variant(record):
                groups.setdefault(f"{name}, {record['arguments']['task']}", []).append(record)
    return {title: runs for title, runs in groups.items() if len(runs) > 1}


def draw(root, name, panel, groups):
    """Write a figure of a panel for each group, and return the page's lines for it."""
    if not groups:
        return ""
    figure, axes = plt.subplots(1, len(groups), figsize=(4.8 * max(len(groups), 1.3), 4.2),
                                squeeze=False, sharey=panel not in (horizon_panel, readout_panel))
    for ax, (title, records) in zip(axes[0], groups.items()):
        panel(ax, records)
        ax.set_title(title, parse_math=False, fontsize=11)
    for ax in axes[0][1:]:
        ax.set_ylabel("")
    gdn.write_whole(root / f"{name}.png", lambda path: figure.savefig(path, format="png"))
    plt.close(figure)
    return f"![{FIGURES[name]}]({name}.png)\n\n*{FIGURES[name]}*\n"


# ---- the page -----------------------------------------------------------------------------------

def table(head, rows):
    if not rows:
        return "Its stage has not run.\n"
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines) + "\n"


def share(record, rank):
    """A change in loss as a share of what wiping the same states costs: ' (3% of rank 0)'."""
    if 0 not in ranks_of(record) or rank == 0:
        return ""
    part = changes(record, "loss", rank).mean() / changes(record, "loss", 0).mean()
    return f" ({part:.0%} of rank 0)"


def level(numbers):
    """A mean that is no change, with its standard error."""
    return gdn.with_error(numbers).removeprefix("+")


def finding(records):
    """What was found on a model, in one line."""
    words = []
    for record in find(records, "03_loss")[:1]:
        rank, n = near_12(record), len(record["items"])
        change, other = changes(record, "loss", rank), 1 - values(record, "agree", rank).mean()
        words.append(f"with {rank} of {min(record['state'])} modes ({named(record)}) the loss "
                     f"changes by {gdn.with_error(change)} nats{share(record, rank)}, and "
                     f"{other:.1%} of the most likely tokens are others ({n} documents)")
    if find(records, "02_decay"):
        words.append(f"{long_heads(records)} heads have a horizon over 4,096 tokens, "
                     f"{short_heads(records)} one of at most 256")
    tasks = [record for record in find(records, "04_ruler") if not variant(record)]
    moved = []
    for record in tasks:
        rank, arguments = near_12(record), record["arguments"]
        mean, error = gdn.mean_se(changes(record, "scores", rank))
        if abs(mean) > 2 * (error or 0):
            moved.append(f"{arguments['task']} at {arguments['length']:,} by {mean:+.0f} points")
    if tasks:
        words.append(f"{near_12(tasks[0])} modes move the scores of {len(moved)} of {len(tasks)} "
                     f"tasks by over two standard errors{': ' * bool(moved)}{', '.join(moved)}")
    return "; ".join(words)


def loss_tables(models):
    """By model, a row a rank: change in loss, KL and agreement of every way of truncating."""
    pages = []
    for name, records in models.items():
        runs, head = find(records, "03_loss"), ["rank"]
        full = [values(record, "loss", "full").mean() for record in runs]
        rows = [["full"]] + [[rank] for rank in ranks_of(*runs)]
        for record, loss in zip(runs, full):
            head += [f"{named(record)}: change in loss, nats", "KL, nats", "same token"]
            rows[0] += [f"{loss:.4f} nats", "", ""]
            for row in rows[1:]:
                cells = ["", "", ""]
                if row[0] in ranks_of(record):
                    change = gdn.with_error(changes(record, "loss", row[0]))
                    cells = [change + share(record, row[0]), level(values(record, "kl", row[0])),
                             f"{values(record, 'agree', row[0]).mean():.1%}"]
                row += cells
        pages.append(f"**{name}**\n\n{table(head, rows)}")
    return "\n".join(pages) or table([], [])


def task_table(models):
    """Score of the full state, and by rank the change, with the samples better and worse."""
    runs = [(name, record) for name in models for record in find(models[name], "04_ruler")]
    ranks, rows = ranks_of(*(record for _, record in runs)), []
    for name, record in runs:
        full, arguments = values(record, "scores", "full").mean(), record["arguments"]
        row = [name, arguments["task"], f"{arguments['length']:,}", named(record),
               len(record["items"]), f"{full:.1f}"]
        for rank in ranks:
            cell = ""
            if rank in ranks_of(record):
                change = changes(record, "scores", rank)
                cell = gdn.with_error(change)
                if change.any():
                    cell += f", {(change > 0).sum()} up {(change < 0).sum()} down"
            row.append(cell)
        rows.append(row)
    return table(["model", "task", "length", "truncated", "samples", "full state",
                  *(f"rank {rank}" for rank in ranks)], rows)


def head_table(models):
    """Of the states: means over heads and boundaries, ± standard error over documents."""
    rows = []
    for name, records in models.items():
        record = find(records, "01_spectrum")[0]
        rank, heads = near_12(record), values(record, "effective_rank").mean((0, 1))
        means = [values(record, "effective_rank").mean((1, 2, 3))]
        for key in ("energy", "readout", "overlap"):
            means.append(values(record, key, rank).mean((1, 2)))
        later = {**record, "items": record["items"][1:]}            # the first has no other
        if later["items"]:
            means.append(values(later, "overlap_other", rank).mean((1, 2)))
        rows.append([name, f"{heads.min():.1f}, {np.median(heads):.1f}, {heads.max():.1f} of "
                     f"{min(record['state'])}", rank, *map(level, means)])
    return table(["model", "effective rank: least, median, most of the heads", "r",
                  "effective rank", "energy in the top r", "of what is read",
                  "overlap with the boundary before", "with another document"], rows)


def run_line(record):
    """What a run was, on what, and how long it took."""
    arguments, environment, n = record["arguments"], record["environment"], len(record["items"])
    total = sum(item["seconds"]["total"] for item in record["items"])
    cutting = sum(item["seconds"]["truncate"] for item in record["items"])
    if record["script"] == "04_ruler":
        what = f"{n} samples, seed {arguments['seed']}"
    else:
        what = f"{n} documents of {arguments['tokens']} tokens from {arguments['documents']}"
    return (f"    - {record['file']}: {what}, segment {arguments['segment']}, "
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
FIGURES = {
    "loss": "Change in next-token loss, mean ± standard error over documents.",
    "kl": "KL divergence from the untouched model, mean ± standard error over documents.",
    "after": "Change in loss by the tokens read since the last boundary, mean ± standard error.",
    "tasks": "Change in task score, mean ± standard error over samples.",
    "lengths": "Task score against length, mean ± standard error over samples.",
    "horizon": "Effective rank against decay horizon, a dot a head (dotted: 256 and 4,096 tokens).",
    "along": "Effective rank along the document: mean over heads, and their middle half.",
    "readout": "What is read of the tail against its energy, a dot a head; on the line, as much.",
    "spectra": "Singular values over their sum, mean over boundaries and documents, a line a head."}


def main(*, model: gdn.MODELS = (), results: gdn.TEXT = "results"):
    """Write report.md and its figures from the result files.

    Args:
        model: the models to report, with commas; by default all that are in the folder.
        results: the folder that stages 01 to 04 wrote to.
    """
    root = Path(results)
    names = [Path(gdn.find_model(one)[0]).name for one in model]
    if not names:
        names = sorted(path.name for path in root.glob("*") if path.is_dir())
    read = {name: read_model(root / name) for name in names}
    models = {name.replace("|", "/"): records for name, (records, _) in read.items() if records}
    problems = [problem for _, missing in read.values() for problem in missing]
    if not models:
        raise gdn.Error(f"--results {results} holds no result file of "
                        f"{', '.join(names) or 'a model'} to report: run 01 to 04 first. "
                        f"{'; '.join(problems)}")
    losses, heads = by_model(models, "03_loss"), by_model(models, "01_spectrum")
    both, tasks = by_model(models, "01_spectrum", "02_decay"), by_model(models, "04_ruler")
    page = ["# How much of the Gated DeltaNet state do these models depend on?\n"]
    page += [f"- **{name}**: {finding(records)}." for name, records in models.items()]
    page += ["", INTRODUCTION]
    if problems:
        page += ["Not in this report:\n", *(f"- {problem}" for problem in problems), ""]
    claims = [[claim, said, *(cell(records) or "not run" for records in models.values())]
              for claim, said, cell in CLAIMS]
    page += ["## The post's claims\n", table(["claim", "the post says", *models], claims)]
    page += [CLAIMS_NOTE, *(f"- {name}: {differences(models[name])}" for name in models)]
    page += ["\n## Next-token loss\n", loss_tables(losses),
             draw(root, "loss", loss_panel, losses), draw(root, "kl", kl_panel, losses),
             draw(root, "after", after_panel, losses),
             "## Tasks\n", task_table(tasks), draw(root, "tasks", tasks_panel, by_variant(models)),
             draw(root, "lengths", lengths_panel, by_task(models)),
             "## Heads\n", head_table(heads), draw(root, "horizon", horizon_panel, both),
             draw(root, "along", along_panel, both), draw(root, "readout", readout_panel, heads),
             draw(root, "spectra", spectra_panel, heads), "## Runs\n"]
    for name, records in models.items():
        made = records[0]
        page.append(f"- {name} ({made['model']}; torch {made['environment']['torch']}, "
                    f"transformers {made['environment']['transformers']})")
        page += [run_line(record) for record in records]
    text = "\n".join(page) + "\n"
    gdn.write_whole(root / "report.md", lambda path: path.write_text(text, encoding="utf-8"))
    print(root / "report.md")


if __name__ == "__main__":
    gdn.command(main)

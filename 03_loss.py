"""Next-token loss with every GDN state cut back to its top r singular modes at each boundary.

    python 03_loss.py                                                     # the bundled models
    python 03_loss.py --model Qwen/Qwen3.5-0.8B --documents c4 --tokens 16384       # the post's
    python 03_loss.py --heads over-256    # truncate only the heads that remember (02 says which)
    python 03_loss.py --keep random           # a control: keep random modes instead of the largest

Every rank is a row of one batch, and the untouched model is row 0: so the change in loss is paired
by document, and each prediction is compared with the untouched model's on the same tokens.
"""
import torch
from transformers import DynamicCache

import gdn

RANKS = (48, 32, 24, 16, 12, 8, 4, 2, 1, 0)


def main(*, model: gdn.MODELS = gdn.BUNDLED, documents: gdn.TEXT = "stdlib", docs: gdn.NUMBER = 8,
         tokens: gdn.NUMBER = 4096, segment: gdn.NUMBER = 256, ranks: gdn.NUMBERS = RANKS,
         keep: gdn.MODES = "top", heads: gdn.HEADS = "all", rows: gdn.NUMBER = None,
         device: gdn.TEXT = "auto", dtype: gdn.DTYPE = "auto", results: gdn.TEXT = "results"):
    """Measure next-token loss when the states carried across boundaries are truncated.

    Args:
        model: folders, hub ids, tiny/hybrid or tiny/recurrent, with commas; tiny is the last two.
        documents: stdlib, c4, or a .txt, .jsonl, .jsonl.gz or folder of text files.
        docs: how many documents.
        tokens: how many tokens of each document.
        segment: tokens between boundaries; 1 truncates after every token.
        ranks: modes to keep; 0 wipes the state (48,32,24,16,12,8,4,2,1,0).
        keep: which modes: top, or as a control bottom or random.
        heads: all, or those with a decay horizon over-N or upto-N tokens; 02 must have run.
        rows: at most so many ranks side by side, if memory is short; all of them by default.
        device: auto, cpu, cuda, cuda:1, ..., or map for a model larger than one device.
        dtype: auto (the checkpoint's own), float32, bfloat16 or float16.
        results: the folder to write to.
    """
    arguments = dict(locals())
    if tokens <= segment + 1:                                       # the last token predicts none
        raise gdn.Error(f"--tokens {tokens} holds no prediction after a boundary of --segment "
                        f"{segment}: nothing would be truncated")
    edges, bins = after_bins(tokens, segment)
    counts = bins.bincount(minlength=len(edges)).tolist()
    runs = gdn.plan("03_loss", arguments)
    for run in runs:
        run.ranks = gdn.check_ranks(run, ranks, RANKS)
        run.mask = gdn.chosen_heads(run, heads)                         # [L, H]
        gdn.open_documents(run, {**arguments, "ranks": run.ranks}, after_bins=edges,
                           after_counts=counts, heads_cut=[int(run.mask.sum()), run.mask.numel()])
    for run in runs:
        groups = gdn.row_groups(run.ranks, rows)
        for net, ids, item, bar in gdn.unmeasured(run, passes=len(groups)):
            for group in groups:
                rows_of_tokens = measure(net, run.layers, ids, segment, group, keep, run.mask,
                                         item["seconds"], bar)
                summarise(item, group, rows_of_tokens, bins)
        print_table(run)


def measure(net, layers, ids, segment, group, keep, mask, seconds, bar):
    """Loss, KL and agreement of every prediction in one document, [3, R, T - 1], a row a rank.

    ids [1, T]; group: ranks, the first of them None, the untouched model.
    """
    cache, found = DynamicCache(config=net.config), []
    for start, hidden, boundary in gdn.segments(net, ids, segment, cache):
        targets = ids[0, start + 1:start + 1 + hidden.shape[1]]         # the last token has none
        values = gdn.token_losses(net, hidden[:, :len(targets)], targets)
        found.append(torch.stack(values).expand(-1, len(group), -1))    # rows are one at first
        if boundary:
            position = start + hidden.shape[1]
            with gdn.stopwatch(seconds, "truncate"):
                gdn.truncate_rows(cache, layers, group, keep, int(ids.sum()) + position, mask)
        bar.update(hidden.shape[1])
    return torch.cat(found, -1).double()


def after_bins(tokens, segment):
    """Edges 0, 1, 4, 16, ..., segment, and the bin [tokens - 1] of every prediction.

    Bin 0 is the first segment, which no truncation has touched; bin i > 0 has the predictions made
    when edges[i - 1] up to edges[i] tokens (exclusive) lay between the last boundary and the token
    that predicts.
    """
    edges = [0, *(4 ** i for i in range(32) if 4 ** i < segment), segment]
    position = torch.arange(tokens - 1)
    bins = torch.bucketize(position % segment, torch.tensor(edges), right=True)
    bins[position < segment] = 0
    return edges, bins


def summarise(item, group, rows_of_tokens, bins):
    """Add the means of a group of ranks to a document's item."""
    counts = bins.bincount(minlength=int(bins.max()) + 1)
    for rank, loss, kl, agree in zip(group, *rows_of_tokens):           # [T - 1] each
        name = "full" if rank is None else str(rank)
        sums = torch.zeros(len(counts)).double().index_add(0, bins, loss)
        item.setdefault("loss", {})[name] = loss.mean().item()
        item.setdefault("after", {})[name] = (sums / counts.clamp_min(1)).tolist()
        if rank is not None:
            item.setdefault("kl", {})[name] = kl.mean().item()
            item.setdefault("agree", {})[name] = agree.mean().item()


def print_table(run):
    items = run.record["items"]
    full, _ = gdn.mean_se([item["loss"]["full"] for item in items])
    print(f"{run.model}, full state: {full:.4f} nats a token over {len(items)} documents\n"
          f"{'rank':>6} {'change in loss':>22} {'KL from full':>22} {'same top token':>15}")
    for rank in map(str, run.ranks):
        change = gdn.with_error([item["loss"][rank] - item["loss"]["full"] for item in items])
        kl = gdn.with_error([item["kl"][rank] for item in items])
        agree, _ = gdn.mean_se([item["agree"][rank] for item in items])
        print(f"{rank:>6} {change:>22} {kl:>22} {agree:15.1%}")
    print(f"{run.path}\n")


if __name__ == "__main__":
    gdn.command(main)

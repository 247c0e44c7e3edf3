"""Next-token loss with every GDN state cut back to its top r singular modes at each boundary.

    python 03_loss.py                                                     # the bundled model
    python 03_loss.py --model Qwen/Qwen3.5-0.8B --documents c4 --tokens 16384       # the post's
    python 03_loss.py --heads over-256    # truncate only the heads that remember (02 says which)
    python 03_loss.py --keep random           # a control: keep random modes instead of the largest
    python 03_loss.py --store int8            # store what crosses a boundary in 8 bits a number

Every rank is a row of a batch, beside the untouched model as row 0: so the change in loss is paired
by document, and each prediction is compared with the untouched model's on the same tokens.
"""
import gdn
import torch
from transformers import DynamicCache

RANKS = (48, 32, 24, 16, 12, 8, 4, 2, 1, 0)


def main(*, model: str = "tiny/hybrid", documents: str = "stdlib", docs: gdn.count = 8,
         tokens: gdn.count = 4096, segment: gdn.count = 256, ranks: gdn.counts = RANKS,
         keep: gdn.Keep = "top", heads: gdn.heads = "all", store: gdn.Store = "float32",
         rows: gdn.count = None, device: str = "auto", dtype: gdn.DType = "auto",
         results: str = "results"):
    """Measure next-token loss when the states carried across boundaries are truncated."""
    arguments = dict(locals())
    if tokens <= segment + 1:                                       # the last token predicts none
        raise gdn.Error(f"--tokens {tokens} holds no prediction after a boundary of --segment "
                        f"{segment}: nothing would be truncated")
    run = gdn.open_model(model, device, dtype, results)
    ranks = gdn.check_ranks(run, ranks, RANKS, store)
    cut = gdn.Cut(keep, store, gdn.chosen_heads(run, heads))
    texts = gdn.documents(documents, run.tokenizer, docs, tokens)
    edges, bins = after_bins(tokens, segment)
    path, record = gdn.open_results(
        run, "03_loss", {**arguments, "ranks": ranks}, texts, cut, after_bins=edges,
        after_counts=bins.bincount(minlength=len(edges)).tolist())
    rows = rows or len(ranks)
    groups = [ranks[i:i + rows] for i in range(0, len(ranks), rows)]
    left = texts[len(record["items"]):]
    gdn.start(run, path, len(left), len(left) * tokens * len(groups))
    for name, sha, ids in left:
        item = {"name": name, "sha256": sha, "loss": {}, "kl": {}, "agree": {}, "after": {}}
        for group in groups:
            summarise(item, group, measure(run, ids, segment, group, cut), bins)
        gdn.add_item(run, path, record, item)
    run.bar.close()
    print_table(record)
    print(path)


def measure(run, ids, segment, ranks, cut):
    """Loss, KL and agreement of every prediction in one document, [3, 1 + R, T - 1], ids [1, T]."""
    cache, found, gram = DynamicCache(config=run.net.config), [], 0.0
    with gdn.recorded_rule(run.net) as calls:
        for start, hidden, boundary in gdn.segments(run.net, ids, segment, cache):
            targets = ids[0, start + 1:start + 1 + hidden.shape[1]]     # the last token has none
            losses = gdn.token_losses(run.net, hidden[:, :len(targets)], targets)
            found.append(losses.expand(-1, 1 + len(ranks), -1))         # rows are one at first
            if boundary:
                position = start + hidden.shape[1]
                with gdn.at_boundary(run):
                    gram = gdn.truncate_rows(cache, ranks, cut, int(ids.sum()) + position, calls,
                                             gram)
            run.bar.update(hidden.shape[1])
    return torch.cat(found, -1)


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


def summarise(item, ranks, losses, bins):
    """Add the means of the untouched row and a group of ranks to a document's item."""
    counts = bins.bincount()
    for rank, loss, kl, agree in zip(["full", *map(str, ranks)], *losses):          # [T - 1] each
        sums = torch.zeros(len(counts)).double().index_add(0, bins, loss)
        item["loss"][rank] = loss.mean().item()
        item["after"][rank] = (sums / counts.clamp_min(1)).tolist()
        if rank != "full":
            item["kl"][rank] = kl.mean().item()
            item["agree"][rank] = agree.mean().item()


def print_table(record):
    items = record["items"]
    full, _ = gdn.mean_se([item["loss"]["full"] for item in items])
    print(f"{record['model']}, full state: {full:.4f} nats a token over {len(items)} documents\n"
          f"{'rank':>6} {'bytes a head':>13} {'change in loss':>22} {'KL from full':>22} "
          f"{'same top token':>15}")
    for rank, size in record["bytes"].items():
        change = gdn.with_error([item["loss"][rank] - item["loss"]["full"] for item in items])
        kl = gdn.with_error([item["kl"][rank] for item in items]).removeprefix("+")
        agree, _ = gdn.mean_se([item["agree"][rank] for item in items])
        print(f"{rank:>6} {size:>13,} {change:>22} {kl:>22} {agree:15.1%}")


if __name__ == "__main__":
    gdn.command(main)

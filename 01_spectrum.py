"""The spectrum of every head's state, and how much of its tail the text that follows reads.

    python 01_spectrum.py                                             # the bundled models
    python 01_spectrum.py --model Qwen/Qwen3.5-0.8B --documents c4 --tokens 16384   # the post's

The states are looked at, and left alone, at every segment boundary of every document: effective
rank and singular values; the share of energy in the top r modes, and of what the next segment reads
of the state (gdn.effective_queries); and the overlap of the top-r subspace of keys with that of the
boundary before, and, for comparison, with that of another document.
"""
from statistics import median

import torch
from transformers import DynamicCache

import gdn

RANKS = (48, 32, 24, 16, 12, 8, 4, 2, 1)


def main(*, model: gdn.MODELS = gdn.BUNDLED, documents: gdn.TEXT = "stdlib", docs: gdn.NUMBER = 8,
         tokens: gdn.NUMBER = 4096, segment: gdn.NUMBER = 256, ranks: gdn.NUMBERS = RANKS,
         device: gdn.TEXT = "auto", dtype: gdn.DTYPE = "auto", results: gdn.TEXT = "results"):
    """Measure the singular modes of every GDN state at every segment boundary.

    Args:
        model: folders, hub ids, tiny/hybrid or tiny/recurrent, with commas; tiny is the last two.
        documents: stdlib, c4, or a .txt, .jsonl, .jsonl.gz or folder of text files.
        docs: how many documents.
        tokens: how many tokens of each document.
        segment: tokens between boundaries.
        ranks: r for the shares and the overlaps of the top r modes (48,32,24,16,12,8,4,2,1).
        device: auto, cpu, cuda, cuda:1, ..., or map for a model larger than one device.
        dtype: auto (the checkpoint's own), float32, bfloat16 or float16.
        results: the folder to write to.
    """
    arguments = dict(locals())
    if tokens <= 2 * segment:
        raise gdn.Error(f"--tokens {tokens} holds fewer than two boundaries of --segment "
                        f"{segment}: the overlap needs two")
    if 0 in ranks:
        raise gdn.Error("--ranks 0 keeps no mode to look at here: it is a rank of 03 and 04")
    runs = gdn.plan("01_spectrum", arguments)
    for run in runs:
        run.ranks = gdn.check_ranks(run, ranks, RANKS)
        gdn.open_documents(run, {**arguments, "ranks": run.ranks})
    for run in runs:
        other = None
        for net, ids, item, bar in gdn.unmeasured(run):
            if other is None and run.record["items"]:                   # a stopped run goes on
                first = run.documents[0][2].to(ids.device)
                other = last_vectors(net, run.layers, first, segment)
            seconds = item["seconds"]
            found, last = measure(net, run.layers, ids, segment, run.ranks, other, seconds, bar)
            item.update(found)
            if other is None:
                other = last
        print_table(run)


def measure(net, layers, ids, segment, ranks, other, seconds, bar):
    """What the boundaries of one document show, and the right vectors [L, H, K, M] at the last one.

    other: the right vectors at the last boundary of another document, or None.
    """
    cache = DynamicCache(config=net.config)
    before, positions = None, []
    effective, spectrum, energy, readout, overlap, overlap_other = ([] for _ in range(6))
    with gdn.recorded_rule(net) as calls:
        for start, hidden, boundary in gdn.segments(net, ids, segment, cache):
            with gdn.stopwatch(seconds, "truncate"):
                if before is not None:
                    readout.append(read_shares(calls, sigma, before))       # [L, H, M]
                if boundary:
                    states = gdn.read_states(cache, layers)[:, 0]           # [L, H, V, K]
                    sigma, vectors = gdn.modes(states)              # [L, H, M], [L, H, K, M]
                    positions.append(start + hidden.shape[1])
                    effective.append(gdn.effective_rank(sigma))             # [L, H]
                    spectrum.append(shares(sigma))
                    energy.append(shares(sigma.square()).cumsum(-1))
                    if before is not None:
                        overlap.append(overlaps(before, vectors, ranks))    # [ranks, L, H]
                    if other is not None:
                        overlap_other.append(overlaps(other, vectors, ranks))
                    before = vectors
            calls.clear()
            bar.update(hidden.shape[1])
    columns = [rank - 1 for rank in ranks]
    found = {"positions": positions, "effective_rank": torch.stack(effective).tolist(),
             "spectrum": torch.stack(spectrum).mean(0).tolist(),
             "energy": by_rank(ranks, torch.stack(energy).mean(0)[..., columns].movedim(-1, 0)),
             "readout": by_rank(ranks, torch.stack(readout).mean(0)[..., columns].movedim(-1, 0)),
             "overlap": by_rank(ranks, torch.stack(overlap).mean(0))}
    if other is not None:
        found["overlap_other"] = by_rank(ranks, torch.stack(overlap_other).mean(0))
    return found, before


def shares(amounts):
    """Amounts [..., M] over their sum; zeros where there is nothing."""
    return amounts / amounts.sum(-1, keepdim=True).clamp_min(1e-300)


def read_shares(calls, sigma, vectors):
    """Of all that a segment reads of a state S, the share of its top 1, 2, ... modes: [L, H, M].

    sum_t |S_r q~_t|^2 is sum_{j<=r} sigma_j^2 sum_t (w_j . q~_t)^2, since the modes are orthogonal.
    """
    found = []
    for call, values, right in zip(calls, sigma, vectors):
        queries = gdn.effective_queries(*call)[0].to(right)             # [n, H, K]
        along = torch.einsum("nhk,hkm->hnm", queries, right)            # w_j . q~_t
        found.append(values.square() * along.square().sum(1))           # [H, M]
    return shares(torch.stack(found)).cumsum(-1)


def overlaps(one, two, ranks):
    """||A_r^T B_r||_F^2 / r of two sets of right vectors [L, H, K, M]: [ranks, L, H]."""
    cosines = (one.mT @ two).square()                                   # [L, H, M, M]
    return torch.stack([cosines[..., :rank, :rank].sum((-2, -1)) / rank for rank in ranks])


def by_rank(ranks, values):
    return {str(rank): value.tolist() for rank, value in zip(ranks, values)}


def last_vectors(net, layers, ids, segment):
    """The right vectors [L, H, K, M] at the last boundary of a document."""
    cache = DynamicCache(config=net.config)
    for _, _, boundary in gdn.segments(net, ids, segment, cache):
        if boundary:
            states = gdn.read_states(cache, layers)[:, 0]
    return gdn.modes(states)[1]


def print_table(run):
    items, few, many = run.record["items"], str(min(run.ranks)), str(max(run.ranks))
    effective = torch.tensor([item["effective_rank"] for item in items]).mean((0, 1))       # [L, H]
    energy = torch.tensor([[item["energy"][rank] for rank in (many, few)] for item in items])
    print(f"{run.model}\n{'layer':>5}  effective rank: least, median, most of its heads   "
          f"energy in the top {many}, {few} modes")
    for i, layer in enumerate(run.layers):
        heads, share = effective[i].tolist(), energy[:, :, i].mean((0, 2)).tolist()
        print(f"{layer:5} {min(heads):21.1f} {median(heads):7.1f} {max(heads):7.1f} "
              f"{share[0]:36.1%} {share[1]:7.1%}")
    print(f"{run.path}\n")


if __name__ == "__main__":
    gdn.command(main)

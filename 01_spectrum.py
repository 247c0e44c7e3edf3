"""The spectrum of every head's state, and how much of its tail the text that follows reads.

    python 01_spectrum.py                                             # the bundled model
    python 01_spectrum.py --model Qwen/Qwen3.5-0.8B --documents c4 --tokens 16384   # the post's

The states are looked at, and left alone, at every segment boundary of every document: effective
rank, beside that of a null with random keys, and singular values; the share of energy in the top r
modes, and of what the next segment reads of the state (gdn.effective_queries); and the overlap of
the top-r subspace of keys with that of the boundary before, and with that of another document.
"""
from statistics import median

import gdn
import torch
from transformers import DynamicCache

RANKS = (48, 32, 24, 16, 12, 8, 4, 2, 1)


def main(*, model: str = "tiny/hybrid", documents: str = "stdlib", docs: gdn.count = 8,
         tokens: gdn.count = 4096, segment: gdn.count = 256, ranks: gdn.counts = RANKS,
         device: str = "auto", dtype: gdn.DType = "auto", results: str = "results"):
    """Measure the singular modes of every GDN state at every segment boundary."""
    arguments = dict(locals())
    if tokens <= 2 * segment:
        raise gdn.Error(f"--tokens {tokens} holds fewer than two boundaries of --segment "
                        f"{segment}: the overlap needs two")
    if 0 in ranks:
        raise gdn.Error("--ranks 0 keeps no mode to look at here: it is a rank of 03 and 04")
    run = gdn.open_model(model, device, dtype, results)
    ranks = gdn.check_ranks(run, ranks, RANKS)
    texts = gdn.documents(documents, run.tokenizer, docs, tokens)
    path, record = gdn.open_results(run, "01_spectrum", {**arguments, "ranks": ranks}, texts)
    left = texts[len(record["items"]):]
    gdn.start(run, path, len(left), len(left) * tokens)
    other = None
    if left and record["items"]:                                        # a stopped run goes on
        _, other = measure(run, texts[0][2], segment, ranks, None)
        run.bar.reset()
    for name, sha, ids in left:
        found, last = measure(run, ids, segment, ranks, other)
        gdn.add_item(run, path, record, {"name": name, "sha256": sha, **found})
        if other is None:
            other = last
    run.bar.close()
    print_table(record)
    print(path)


def measure(run, ids, segment, ranks, other):
    """What the boundaries of one document show, and the right vectors [L, H, K, M] at the last one.

    other: the right vectors at the last boundary of the first document, or None in that document.
    """
    cache = DynamicCache(config=run.net.config)
    null = [None] * len(run.layers)                                     # states [1, H, K, V]
    draws = torch.Generator().manual_seed(int(ids.sum()))
    before, positions = None, []
    effective, random, spectrum, energy, readout, overlap, overlap_other = ([] for _ in range(7))
    with gdn.recorded_rule(run.net) as calls:
        for start, hidden, boundary in gdn.segments(run.net, ids, segment, cache):
            null = [null_state(call, state, draws) for call, state in zip(calls, null)]
            with gdn.at_boundary(run):
                if before is not None:
                    readout.append(read_shares(calls, *before))                 # [L, H, M]
                if boundary:
                    sigma, vectors = gdn.modes(one_device(gdn.states_in(cache)))
                    positions.append(start + hidden.shape[1])
                    effective.append(gdn.effective_rank(sigma))                 # [L, H]
                    random.append(gdn.effective_rank(gdn.modes(one_device(null))[0]))
                    spectrum.append(shares(sigma))                              # [L, H, M]
                    energy.append(shares(sigma.square()).cumsum(-1))
                    if before is not None:
                        overlap.append(overlaps(before[1], vectors, ranks))     # [ranks, L, H]
                    if other is not None:
                        overlap_other.append(overlaps(other, vectors, ranks))
                    before = sigma, vectors
            calls.clear()
            run.bar.update(hidden.shape[1])
    top = [rank - 1 for rank in ranks]
    found = {"positions": positions, "effective_rank": torch.stack(effective).tolist(),
             "effective_rank_null": torch.stack(random).tolist(),
             "spectrum": torch.stack(spectrum).mean(0).tolist(),
             "energy": by_rank(ranks, torch.stack(energy).mean(0)[..., top].movedim(-1, 0)),
             "readout": by_rank(ranks, torch.stack(readout).mean(0)[..., top].movedim(-1, 0)),
             "overlap": by_rank(ranks, torch.stack(overlap).mean(0))}
    if other is not None:
        found["overlap_other"] = by_rank(ranks, torch.stack(overlap_other).mean(0))
    return found, before[1]


def one_device(states):
    """States of all layers, each [1, H, V, K], as one [L, H, V, K]."""
    return torch.cat([state.to(states[0].device) for state in states])


@torch.inference_mode()
def null_state(call, state, draws):
    """The state [1, H, K, V] after a recorded call from `state`, had its keys been random.

    The gates, write strengths and values are the call's, the keys uniform on the unit sphere.
    """
    rule, q, k, v, others = call
    keys = torch.nn.functional.normalize(torch.randn(k.shape, generator=draws), dim=-1)
    others = {**others, "initial_state": state, "output_final_state": True}
    return rule(q, keys.to(k), v, **others)[1]


def shares(amounts):
    """Amounts [..., M] over their sum; zeros where there is nothing."""
    return amounts / amounts.sum(-1, keepdim=True).clamp_min(1e-300)


def read_shares(calls, sigma, vectors):
    """Of all that a segment reads of a state S, the share of its top 1, 2, ... modes: [L, H, M].

    sum_t |S_r q~_t|^2 is sum_{j<=r} sigma_j^2 sum_t (w_j . q~_t)^2, since the modes are orthogonal.
    """
    found = []
    for call, values, right in zip(calls, sigma, vectors):
        queries = gdn.effective_queries([call]).to(right)               # [n, H, K]
        along = torch.einsum("nhk,hkm->hnm", queries, right)            # w_j . q~_t
        found.append(values.square() * along.square().sum(1))           # [H, M]
    return shares(torch.stack(found)).cumsum(-1)


def overlaps(one, two, ranks):
    """||A_r^T B_r||_F^2 / r of two sets of right vectors [L, H, K, M]: [ranks, L, H].

    Modes below 1e-7 of a head's largest are its float32 state's rounding, and overlap at random.
    """
    squares = (one.mT @ two).square()                                   # [L, H, M, M]
    return torch.stack([squares[..., :rank, :rank].sum((-2, -1)) / rank for rank in ranks])


def by_rank(ranks, values):
    return {str(rank): value.tolist() for rank, value in zip(ranks, values)}


def print_table(record):
    items, ranks = record["items"], record["depends"]["ranks"]
    few, many = str(min(ranks)), str(max(ranks))
    effective = torch.tensor([item["effective_rank"] for item in items]).mean((0, 1))       # [L, H]
    null = torch.tensor([item["effective_rank_null"] for item in items]).mean((0, 1))
    energy = torch.tensor([[item["energy"][rank] for rank in (many, few)] for item in items])
    print(f"{record['model']}\n{'layer':>5}  effective rank: least, median, most of its heads"
          f"   with random keys, median   energy in the top {many}, {few} modes")
    for i, layer in enumerate(record["layers"]):
        heads, share = effective[i].tolist(), energy[:, :, i].mean((0, 2)).tolist()
        print(f"{layer:5} {min(heads):21.1f} {median(heads):7.1f} {max(heads):7.1f} "
              f"{median(null[i].tolist()):36.1f} {share[0]:25.1%} {share[1]:7.1%}")


if __name__ == "__main__":
    gdn.command(main)

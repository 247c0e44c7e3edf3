"""The spectrum of every head's state: effective rank, singular values, and how far the retained subspace moves.

    python 01_spectrum.py                                                               # the bundled model
    python 01_spectrum.py --model Qwen/Qwen3.5-0.8B --documents c4 --tokens 16384       # the post's model, on web text

The states are read, and left alone, at every segment boundary of every document.
"""
from statistics import median

import torch

import gdn


def main(*, model="tiny", documents="stdlib", docs=8, tokens=4096, segment=256, ranks=gdn.RANKS, device="auto",
         dtype="auto", results="results"):
    """Measure the singular values of every GDN state at every segment boundary.

    Args:
        model: a bundled model (tiny, tiny/hybrid, tiny/recurrent), a folder, or a Hugging Face hub id.
        documents: stdlib, c4, or a .txt, .jsonl, .jsonl.gz or folder of text files.
        docs: how many documents.
        tokens: how many tokens of each document.
        segment: tokens between boundaries.
        ranks: r for the energy share and the overlap of the top r modes, with commas.
        device: auto, cpu, cuda, cuda:1, ...
        dtype: auto (the checkpoint's own), float32, bfloat16 or float16.
        results: the folder to write to.
    """
    arguments = dict(locals())
    arguments["ranks"] = ranks = gdn.check_ranks(ranks, model)
    if gdn.whole("tokens", tokens) <= 2 * gdn.whole("segment", segment):
        raise gdn.Error(f"--tokens {tokens} holds fewer than two boundaries of --segment {segment}: the overlap needs two")

    def measure(net, layers, ids, timing):
        course, shares, energy, overlap, before = [], [], [], [], None

        def at_boundary(position, cache):
            nonlocal before
            states = gdn.read_states(cache, layers)[:, 0]                       # [L, H, V, K]
            sigma = gdn.singular_values(states)                                 # [L, H, M]
            course.append(gdn.effective_rank(sigma))
            shares.append(sigma / sigma.sum(-1, keepdim=True).clamp_min(1e-30))
            square = sigma.square().double()
            energy.append(square.cumsum(-1) / square.sum(-1, keepdim=True).clamp_min(1e-300))
            modes = gdn.right_modes(states)                                     # [L, H, K, K], the largest mode last
            if before is not None:
                cosines = (before.mT @ modes).square()                          # between every two modes' directions
                overlap.append([cosines[..., -r:, -r:].sum((-2, -1)) / r for r in ranks])
            before = modes

        for _ in gdn.segments(net, ids, segment, at_boundary, timing=timing):
            pass
        energy, overlap = torch.stack(energy).mean(0), [torch.stack(o).mean(0) for o in zip(*overlap)]
        return {"course": torch.stack(course).tolist(), "spectrum": torch.stack(shares).mean(0).tolist(),
                "energy": {r: energy[..., r - 1].tolist() for r in ranks},
                "overlap": {r: o.tolist() for r, o in zip(ranks, overlap)}}

    def summarise(values):
        def mean(pick):
            return torch.tensor([pick(v) for v in values], dtype=torch.float64).mean(0)
        course = mean(lambda v: v["course"])                                    # [boundary, L, H]
        by_rank = {key: {str(r): mean(lambda v: {int(k): x for k, x in v[key].items()}[r]).tolist() for r in ranks}
                   for key in ("energy", "overlap")}
        return {"effective_rank": course.mean(0).tolist(),
                "course": {"positions": list(range(segment, tokens, segment)), "effective_rank": course.tolist()},
                "spectrum": mean(lambda v: v["spectrum"]).tolist(), **by_rank}

    path = gdn.measure_documents("01_spectrum", arguments, measure, summarise)
    found = gdn.read_json(path)["results"]
    print(f"{'layer':>5}  effective rank: least, median, most of its heads   energy in the top {ranks[0]}, {ranks[-1]} modes")
    for i, (layer, heads) in enumerate(zip(found["layers"], found["effective_rank"])):
        share = [sum(found["energy"][str(r)][i]) / len(heads) for r in (ranks[0], ranks[-1])]
        print(f"{layer:5}  {min(heads):20.1f} {median(heads):7.1f} {max(heads):7.1f}"
              f"{share[0]:37.1%} {share[1]:7.1%}")
    print(path)


if __name__ == "__main__":
    gdn.command(main)

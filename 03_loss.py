"""Next-token loss with every GDN state cut back to its top r singular modes at each segment boundary.

    python 03_loss.py                                                                   # the bundled model
    python 03_loss.py --model Qwen/Qwen3.5-0.8B --documents c4 --tokens 16384           # the post's model, on web text
    python 03_loss.py --keep bottom                                                     # a control: keep the smallest

Every rank is a row of one batch, and the untouched model is row 0, so the change in loss is paired by document.
"""
import torch

import gdn


def main(*, model="tiny", documents="stdlib", docs=8, tokens=4096, segment=256, ranks=gdn.RANKS, keep="top", rows=None,
         device="auto", dtype="auto", results="results"):
    """Measure the change in next-token loss when the states carried across boundaries are truncated.

    Args:
        model: a bundled model (tiny, tiny/hybrid, tiny/recurrent), a folder, or a Hugging Face hub id.
        documents: stdlib, c4, or a .txt, .jsonl, .jsonl.gz or folder of text files.
        docs: how many documents.
        tokens: how many tokens of each document.
        segment: tokens between boundaries; 1 truncates after every token.
        ranks: modes to keep, with commas.
        keep: which modes: top, or as a control bottom or random.
        rows: at most so many ranks side by side, if memory is short, with the same results up to rounding; all of them
            by default.
        device: auto, cpu, cuda, cuda:1, ...
        dtype: auto (the checkpoint's own), float32, bfloat16 or float16.
        results: the folder to write to.
    """
    arguments = dict(locals())
    arguments["ranks"] = ranks = gdn.check_ranks(ranks, model)
    if keep not in gdn.KEEP:
        raise gdn.Error(f"--keep is one of {', '.join(gdn.KEEP)}, not {keep!r}")
    if gdn.whole("tokens", tokens) <= gdn.whole("segment", segment) + 1:        # the last token predicts nothing
        raise gdn.Error(f"--tokens {tokens} holds no prediction after a boundary of --segment {segment}: nothing would be "
                        f"truncated")
    every = [None, *ranks]                                                      # None: the model untouched
    groups = gdn.row_groups(every, rows)

    def measure(net, layers, ids, timing):
        loss = []
        for group in groups:
            def at_boundary(position, cache):
                gdn.truncate_rows(cache, layers, group, keep, seed=int(ids.sum()) + position)

            total = torch.zeros(len(group), dtype=torch.float64, device=ids.device)
            batch = ids.expand(len(group), -1)                                  # [R, T]
            for start, hidden in gdn.segments(net, batch, segment, at_boundary, timing=timing):
                targets = batch[:, start + 1:start + 1 + hidden.shape[1]]       # the last token has none
                with gdn.stopwatch(timing, "model", ids.device):
                    total += gdn.token_losses(net, hidden[:, :targets.shape[1]], targets).sum(-1)
            loss += (total / (ids.shape[1] - 1)).tolist()
        return dict(zip(["full", *map(str, ranks)], loss))

    def summarise(values):
        loss = {name: [v[name] for v in values] for name in values[0]}
        change = {str(r): gdn.mean_se([a - b for a, b in zip(loss[str(r)], loss["full"])]) for r in ranks}
        return {"loss": loss, "change": change}

    path = gdn.measure_documents("03_loss", arguments, measure, summarise, rows=len(every),
                                 suffix="" if keep == "top" else f"_{keep}")
    found = gdn.read_json(path)["results"]
    print(f"full state: {sum(found['loss']['full']) / docs:.4f} nats a token over {docs} documents\n"
          f"{'rank':>6}   change in loss ± standard error, nats")
    for rank, change in found["change"].items():
        print(f"{rank:>6}   {change['mean']:+.5f}" + ("" if change["se"] is None else f" ± {change['se']:.5f}"))
    print(path)


if __name__ == "__main__":
    gdn.command(main)

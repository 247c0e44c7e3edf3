"""How long every head remembers: its decay horizon and mean write strength.

    python 02_decay.py                                                                  # the bundled model
    python 02_decay.py --model Qwen/Qwen3.5-0.8B --documents c4 --tokens 16384 --dtype float32      # the post's model, on web text

The gates are recorded as the layers hand them to the recurrence, and averaged over all tokens. A checkpoint in bfloat16
rounds them by about a hundredth: --dtype float32 takes them exactly.
"""
from statistics import median

import torch

import gdn


def main(*, model="tiny", documents="stdlib", docs=8, tokens=4096, segment=256, device="auto", dtype="auto",
         results="results"):
    """Measure the decay a and the write strength b of every GDN head.

    Args:
        model: a bundled model (tiny, tiny/hybrid, tiny/recurrent), a folder, or a Hugging Face hub id.
        documents: stdlib, c4, or a .txt, .jsonl, .jsonl.gz or folder of text files.
        docs: how many documents.
        tokens: how many tokens of each document.
        segment: tokens fed at a time.
        device: auto, cpu, cuda, cuda:1, ...
        dtype: auto (the checkpoint's own), float32, bfloat16 or float16.
        results: the folder to write to.
    """
    arguments = dict(locals())

    def measure(net, layers, ids, timing):
        with gdn.record_gates(net) as gates:
            for _ in gdn.segments(net, ids, segment, lambda position, cache: None, timing=timing):
                pass
        sums = torch.stack([torch.stack(gate).double().sum((1, 2)) for gate in gates])   # [calls, (log a, b), H]
        means = sums.view(-1, len(layers), 2, sums.shape[-1]).sum(0) / ids.numel()       # [L, 2, H]
        return {"log_a": means[:, 0].tolist(), "write_strength": means[:, 1].tolist()}

    def summarise(values):
        log_a, b = (torch.tensor([v[key] for v in values], dtype=torch.float64).mean(0)
                    for key in ("log_a", "write_strength"))
        horizon = gdn.decay_horizon(log_a).clamp_max(1e12)                               # JSON knows no infinity
        return {"horizon": horizon.tolist(), "write_strength": b.tolist(), "heads": horizon.numel(),
                "long_heads": int((horizon > 4096).sum()), "short_share": (horizon <= 256).double().mean().item()}

    path = gdn.measure_documents("02_decay", arguments, measure, summarise)
    found = gdn.read_json(path)["results"]
    print(f"{'layer':>5}  horizon in tokens: least, median, most of its heads   mean write strength")
    for layer, heads, b in zip(found["layers"], found["horizon"], found["write_strength"]):
        print(f"{layer:5}  {min(heads):23.1f} {median(heads):9.1f} {max(heads):9.1f} {sum(b) / len(b):26.3f}")
    print(f"{found['long_heads']} of {found['heads']} heads have a horizon over 4,096 tokens, "
          f"{found['short_share']:.0%} one of at most 256\n{path}")


if __name__ == "__main__":
    gdn.command(main)

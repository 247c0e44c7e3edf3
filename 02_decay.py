"""How long every head remembers: its decay horizon and mean write strength.

    python 02_decay.py                                                        # the bundled models
    python 02_decay.py --model Qwen/Qwen3.5-0.8B --documents c4 --tokens 16384      # the post's

The gates are recorded as the layers hand them to the recurrence, and averaged over all tokens. A
checkpoint in bfloat16 rounds them by about a hundredth, so they are measured in float32.
"""
from statistics import median

import torch
from transformers import DynamicCache

import gdn


def main(*, model: gdn.MODELS = gdn.BUNDLED, documents: gdn.TEXT = "stdlib", docs: gdn.NUMBER = 8,
         tokens: gdn.NUMBER = 4096, segment: gdn.NUMBER = 256, device: gdn.TEXT = "auto",
         dtype: gdn.DTYPE = "float32", results: gdn.TEXT = "results"):
    """Measure the decay a and the write strength b of every GDN head.

    Args:
        model: folders, hub ids, tiny/hybrid or tiny/recurrent, with commas; tiny is the last two.
        documents: stdlib, c4, or a .txt, .jsonl, .jsonl.gz or folder of text files.
        docs: how many documents.
        tokens: how many tokens of each document.
        segment: tokens fed at a time.
        device: auto, cpu, cuda, cuda:1, ..., or map for a model larger than one device.
        dtype: auto (the checkpoint's own), float32, bfloat16 or float16.
        results: the folder to write to.
    """
    arguments = dict(locals())
    runs = gdn.plan("02_decay", arguments)
    for run in runs:
        gdn.open_documents(run, arguments)
    for run in runs:
        for net, ids, item, bar in gdn.unmeasured(run):
            item.update(measure(net, run.layers, ids, segment, bar))
        print_table(run)


def measure(net, layers, ids, segment, bar):
    """Mean log a and mean b of every head over the tokens of one document, [layer][head] each."""
    cache = DynamicCache(config=net.config)
    log_a, b = 0.0, 0.0                                                 # sums over tokens, [L, H]
    with gdn.recorded_rule(net) as calls:
        for _, hidden, _ in gdn.segments(net, ids, segment, cache):
            log_a += torch.stack([gates["g"][0].double().sum(0).cpu() for *_, gates in calls])
            b += torch.stack([gates["beta"][0].double().sum(0).cpu() for *_, gates in calls])
            calls.clear()
            bar.update(hidden.shape[1])
    tokens = ids.shape[1]
    return {"log_a": (log_a / tokens).tolist(), "write_strength": (b / tokens).tolist()}


def print_table(run):
    items = run.record["items"]
    log_a = torch.tensor([item["log_a"] for item in items], dtype=torch.float64).mean(0)    # [L, H]
    strength = torch.tensor([item["write_strength"] for item in items]).mean((0, 2))        # [L]
    horizon = gdn.decay_horizon(log_a)
    print(f"{run.model}\n{'layer':>5}  horizon in tokens: least, median, most    mean b (writing)")
    for layer, heads, b in zip(run.layers, horizon.tolist(), strength.tolist()):
        print(f"{layer:5} {min(heads):24.1f} {median(heads):8.1f} {max(heads):8.1f} {b:22.3f}")
    print(f"{int((horizon > 4096).sum())} of {horizon.numel()} heads have a horizon over 4,096 "
          f"tokens, {(horizon <= 256).double().mean():.0%} one of at most 256\n{run.path}\n")


if __name__ == "__main__":
    gdn.command(main)

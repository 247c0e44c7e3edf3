"""How long every head remembers: its decay horizon and mean write strength.

    python 02_decay.py                                                        # the bundled model
    python 02_decay.py --model Qwen/Qwen3.5-0.8B --documents c4 --tokens 16384      # the post's

The gates are recorded as the layers hand them to the recurrence, and averaged over all tokens. A
checkpoint in bfloat16 rounds them by about a hundredth, so they are measured in float32.
"""
from statistics import median

import gdn
import torch
from transformers import DynamicCache


def main(*, model: str = "tiny/hybrid", documents: str = "stdlib", docs: gdn.count = 8,
         tokens: gdn.count = 4096, segment: gdn.count = 256, device: str = "auto",
         dtype: gdn.DType = "float32", results: str = "results"):
    """Measure the decay a and the write strength b of every GDN head."""
    arguments = dict(locals())
    run = gdn.open_model(model, device, dtype, results)
    texts = gdn.documents(documents, run.tokenizer, docs, tokens)
    path, record = gdn.open_results(run, "02_decay", arguments, texts)
    left = texts[len(record["items"]):]
    gdn.start(run, path, len(left), len(left) * tokens)
    for name, sha, ids in left:
        gdn.add_item(run, path, record, {"name": name, "sha256": sha, **measure(run, ids, segment)})
    run.bar.close()
    print_table(record)
    print(path)


def measure(run, ids, segment):
    """Mean log a and mean b of every head over the tokens of one document, [layer][head] each."""
    cache = DynamicCache(config=run.net.config)
    log_a, b = 0.0, 0.0                                                 # sums over tokens, [L, H]
    with gdn.recorded_rule(run.net) as calls:
        for _, hidden, _ in gdn.segments(run.net, ids, segment, cache):
            log_a += torch.stack([gates["g"][0].double().sum(0).cpu() for *_, gates in calls])
            b += torch.stack([gates["beta"][0].double().sum(0).cpu() for *_, gates in calls])
            calls.clear()
            run.bar.update(hidden.shape[1])
    tokens = ids.shape[1]
    return {"log_a": (log_a / tokens).tolist(), "write_strength": (b / tokens).tolist()}


def print_table(record):
    items = record["items"]
    log_a = torch.tensor([item["log_a"] for item in items], dtype=torch.float64).mean(0)    # [L, H]
    strength = torch.tensor([item["write_strength"] for item in items]).mean((0, 2))        # [L]
    horizon = gdn.decay_horizon(log_a)
    print(f"{record['model']}\n{'layer':>5}  horizon in tokens: least, median, most    mean b "
          "(writing)")
    for layer, heads, b in zip(record["layers"], horizon.tolist(), strength.tolist()):
        print(f"{layer:5} {min(heads):24.1f} {median(heads):8.1f} {max(heads):8.1f} {b:22.3f}")
    print(f"{int((horizon > 4096).sum())} of {horizon.numel()} heads have a horizon over 4,096 "
          f"tokens, {(horizon <= 256).double().mean():.0%} one of at most 256")


if __name__ == "__main__":
    gdn.command(main)

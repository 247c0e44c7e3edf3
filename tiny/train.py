"""Trains the bundled models, tiny/hybrid and tiny/recurrent, from nothing on one core of a CPU.

    python tiny/train.py --name recurrent                       # hours; stopped, it goes on later
    python tiny/train.py --name hybrid --steps 20 --out /tmp/x  # a look

They learn the tasks of 04_ruler.py and the standard library's files that gdn.stdlib_files does not
hold out, with the shape and vocabulary of their own config.json and tokenizer.json (see README.md).
"""
import importlib
import json
import math
import sys
import time
from pathlib import Path
from random import Random

import torch
from safetensors.torch import save_file
from tqdm import tqdm
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, logging

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
import gdn
ruler = importlib.import_module("04_ruler")

STEPS = {"hybrid": 6400, "recurrent": 4400}
GROWING = {"hybrid": 2500, "recurrent": 2600}   # steps of the curriculum; then lengths are mixed
ENOUGH = {"hybrid": 0.8, "recurrent": 0.7}      # skill at which a task gets longer
LENGTHS = [128, 192, 256, 384, 512]             # the curriculum: tokens in a sequence
TASK_TOKENS, TEXT_TOKENS = 3072, 1024           # of a step
EVERY = 25                                      # steps from one checkpoint and log line to the next
# By task: its share of the sequences, about the tokens of a unit of its size, its shortest length.
SHARE = {"niah_multikey_2": 6, "niah_single_1": 2, "niah_multikey_1": 2, "niah_multivalue": 1,
         "niah_multiquery": 1, "vt": 3, "cwe": 4, "fwe": 4}
UNIT = {"niah_multikey_2": 20, "niah_single_1": 7, "niah_multikey_1": 19, "niah_multivalue": 19,
        "niah_multiquery": 19, "vt": 7, "cwe": 5.6, "fwe": 2.3}
SHORTEST = {"niah_multikey_2": 128, "niah_single_1": 128, "niah_multikey_1": 256,
            "niah_multivalue": 256, "niah_multiquery": 256, "vt": 128, "cwe": 128, "fwe": 192}
ANY_ORDER = ("niah_multivalue", "cwe", "fwe")   # whose references are right in any order
WEIGHTS = {"context": 0.1, "question": 0.5, "answer": 1.0}      # of the mean losses; text has 1


def first_size(task, length, rng):
    """A size that about fills a length, and the task's options: short sequences are easier."""
    room, options = length - 30, {}
    if task == "vt":
        options = {"hops": rng.choice([1, 2, 3, 4, 4, 4] if length >= 192 else [1, 2])}
        room -= 23 * options["hops"] + 15
    elif task == "cwe":
        repeats = rng.choice([6, 6, 4, 3])
        common = min(10, int(0.9 * (room - 25) / UNIT[task] / (repeats + 1.2)))
        room -= common * (repeats * UNIT[task] + 4) + 25
        options = {"common": common, "repeats": (repeats, 1)}
    elif task == "fwe":
        room -= 40
    else:
        keys = 0 if task == "niah_multikey_2" else ruler.NIAH[task].get("keys", 1)
        room -= 21 * keys + min(31 * rng.randint(1, 5), length // 2)        # 1 to 5 questions
    return max(int(room / UNIT[task]), 2), options


def task_sequence(task, length, rng, tokenizer):
    """One context with up to five questions, the first exactly in the form of 04_ruler.py.

    Returns (token, mark, tokens that are right there), at most `length` times. The mark is 0 in the
    context, 1 in a question and its answer's prefix, 2, 3, ... in the answers' references.
    """
    size, options = first_size(task, length, rng)
    seed, any_order = rng.random(), task in ANY_ORDER
    while True:
        context, questions = ruler.build(task, size, Random(seed), length, **options)
        tokens, mark = [], 1
        for question, prefix, references in questions[:5]:
            known, ask = tokenizer([context, context + question + prefix]).input_ids
            context = ""                                            # the next ones share it
            words = tokenizer([" " + reference for reference in references]).input_ids
            words = rng.sample(words, len(words)) if any_order else words
            words[-1].append(tokenizer.eos_token_id)
            if tokens and len(tokens) + len(ask) + sum(map(len, words)) > length:
                break
            tokens += [(token, int(i >= len(known)), {token}) for i, token in enumerate(ask)]
            for n, word in enumerate(words):
                mark += 1
                rest = words[n:] if any_order else [word]           # each could as well come next
                for i, token in enumerate(word):
                    right = {w[i] for w in rest if w[:i] == word[:i] and len(w) > i}
                    tokens.append((token, mark, right))
        if len(tokens) <= length or size == 1:
            return tokens[:length]
        size = min(size - 1, int(size * 0.93))


def task_batch(tasks, length, rng, tokenizer):
    """A sequence a task: ids [B, T], marks [B, T] and right tokens [B, T, 10]; -1 is nothing."""
    batch = torch.full((len(tasks), length, 12), -1)
    for row, task in enumerate(tasks):
        for i, (token, mark, right) in enumerate(task_sequence(task, length, rng, tokenizer)):
            batch[row, i, :2 + len(right)] = torch.tensor([token, mark, *right])
    batch[:, 0, 1] = -1                                             # nothing predicts the first
    return batch[..., 0].clamp(min=0), batch[..., 1], batch[..., 2:]


def choose(name, mixed, rng, skill, lengths):
    """The length of a step's sequences, and their tasks: the oftener, the more is still wrong."""
    need = {task: SHARE[task] * (1.1 - skill[task]) for task in SHARE}
    if mixed:
        length = rng.choice([192, 256, 384, 512, 512, 1024])
        fitting = [task for task in need if SHORTEST[task] <= length]
    else:
        # `recurrent` finds no needle for long unless all is short at first: nothing outgrows them.
        longest = lengths["niah_multikey_2"] if name == "recurrent" else LENGTHS[-1]
        fitting = [task for task in need if SHORTEST[task] <= longest]
        [leader] = rng.choices(fitting, [need[task] for task in fitting])
        top = LENGTHS.index(lengths[leader])
        length = min(LENGTHS[top if rng.random() < 0.7 else rng.randint(0, top)], longest)
        fitting = [task for task in need if SHORTEST[task] <= length <= lengths[task]]
    return length, rng.choices(fitting, [need[task] for task in fitting], k=TASK_TOKENS // length)


def assess(name, mixed, tasks, marks, wrong, skill, lengths):
    """Update skill, a running share of references right, and with it, not by the clock, lengths."""
    for task, mark, missed in zip(tasks, marks, wrong):
        if mixed or len(mark) == lengths[task]:
            share = 1 - mark[missed].unique().numel() / (mark.max().item() - 1)
            skill[task] += 0.05 * (share - skill[task])
        if not mixed and skill[task] > ENOUGH[name] and lengths[task] < LENGTHS[-1]:
            lengths[task] = LENGTHS[LENGTHS.index(lengths[task]) + 1]
            skill[task] = 0.5                                       # measured anew


def make_model(name):
    sys.modules |= {"fla": None, "causal_conv1d": None}             # fast kernels fail on a CPU
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(HERE / name))
    for layer in model.model.layers:
        if layer.block_type == "linear_attention":
            # Transformers' default forgets within dozens of tokens everywhere; these start with
            # horizons of 1 to 10,000: dt log-uniform in 0.001...0.1, A log-uniform in 0.1...8.
            dt = torch.empty(4).uniform_(math.log(1e-3), math.log(1e-1)).exp()
            layer.linear_attn.dt_bias.data.copy_(dt.expm1().log())          # softplus^-1(dt)
            layer.linear_attn.A_log.data.uniform_(math.log(0.1), math.log(8))
    return model.train()


def make_optimizers(model):
    """Muon for the matrices, AdamW for the rest, slower for the decay gates, or they forget."""
    muon, adam = [], []
    for name, parameter in model.named_parameters():
        if name.endswith(("A_log", "dt_bias", "in_proj_a.weight")):
            adam.append({"params": parameter, "peak": 3e-4})
        elif parameter.ndim == 2 and "embed" not in name and "in_proj_b" not in name:
            muon.append({"params": parameter, "peak": 0.02})
        else:
            adam.append({"params": parameter, "peak": 3e-3})
    return (torch.optim.Muon(muon, weight_decay=0.01, momentum=0.95),
            torch.optim.AdamW(adam, betas=(0.9, 0.95), weight_decay=0.0, fused=True))


def loss_at(model, ids, right, mask):
    """Losses [N] of the tokens in mask [B, T], and whether the most likely token is right [N].

    A loss is minus the logarithm of the probability of all that is right there, right [B, T, any].
    """
    hidden = model.model(ids, use_cache=False).last_hidden_state    # [B, T, D]
    logits = model.lm_head(hidden[:, :-1][mask[:, 1:]])             # [N, W]
    right = right[:, 1:][mask[:, 1:]]                               # [N, any]
    chosen = logits.gather(1, right.clamp(min=0)).masked_fill(right < 0, -math.inf)
    hits = (right == logits.argmax(-1, keepdim=True)).any(-1)
    return logits.logsumexp(-1) - chosen.logsumexp(-1), hits


def backward(model, text, ids, marks, right, step):
    """Add a step's gradients, of the mean loss over text [B, T] and WEIGHTS of those over tasks.

    Sequences' answers weigh alike. Returns the means, and which tokens [B, T] of answers are wrong.
    """
    loss, _ = loss_at(model, text, text[..., None], torch.ones_like(text, dtype=torch.bool))
    loss.mean().backward()
    means = {"text": loss.mean().item()}
    # A quarter of the contexts' tokens is enough, and the head is a third of the work.
    some = torch.rand(marks.shape, generator=torch.Generator().manual_seed(step)) <= 0.25
    kinds = {"context": (marks == 0) & some, "question": marks == 1, "answer": marks >= 2}
    shares = {kind: mask / mask.sum() for kind, mask in kinds.items()}
    shares["answer"] = kinds["answer"] / kinds["answer"].sum(1, keepdim=True) / len(ids)
    weights = sum(WEIGHTS[kind] * share for kind, share in shares.items())
    mask = weights > 0
    loss, hits = loss_at(model, ids, right, mask)
    (loss * weights[mask]).sum().backward()
    means |= {kind: (loss * share[mask]).sum().item() for kind, share in shares.items()}
    wrong = torch.zeros_like(mask).masked_scatter(mask, ~hits)
    return means, wrong & kinds["answer"]


def resume(path, parts, state):
    """Give the parts what the checkpoint holds of them, and return what it holds of the state."""
    try:
        loaded = torch.load(path, weights_only=True)                # data alone, never code
        for name, part in parts.items():
            part.load_state_dict(loaded[name])
        return {name: loaded[name] for name in state}
    except Exception as error:              # of a dozen kinds, by what is wrong with the file
        raise gdn.Error(f"cannot go on from {path} ({type(error).__name__}): delete it to start "
                        "over, or give another --out") from None


def write(out, parts, tokenizer, state):
    """The log, a checkpoint to go on from, and one like any other: matrices bfloat16, for size."""
    held = state | {name: part.state_dict() for name, part in parts.items()}
    gdn.write_whole(out / "checkpoint.pt", lambda temporary: torch.save(held, temporary))
    (out / "train.jsonl").write_text("".join(json.dumps(line) + "\n" for line in state["log"]))
    model = parts["model"]
    weights = {name: p.bfloat16() if p.ndim > 1 else p for name, p in model.named_parameters()}
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    model.config.save_pretrained(out)
    tokenizer.save_pretrained(out)


def bundled(typed):
    """hybrid or recurrent"""
    return gdn.matched("hybrid|recurrent", typed)


def minutes(typed):
    """a number of minutes"""
    return float(gdn.matched(r"[0-9]+(\.[0-9]+)?", typed))


def train(*, name: bundled = "recurrent", steps: gdn.count = None, out: str = None,
          minutes: minutes = math.inf):
    """Train a bundled model; write its checkpoint, its tokenizer and a log, train.jsonl.

    Args:
        name: hybrid or recurrent.
        steps: of about 4,096 tokens, the last 40 % with a falling learning rate (6,400 and 4,400).
        out: the folder to write; tiny/NAME by default.
        minutes: stop after so long; the next run goes on from the folder's checkpoint.pt.
    """
    steps, out = steps or STEPS[name], Path(out or HERE / name)
    saved = out / "checkpoint.pt"
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)      # fast-decaying heads make denormals, which are slow
    torch.manual_seed(0)
    logging.set_verbosity_error()
    model, tokenizer = make_model(name), AutoTokenizer.from_pretrained(HERE / name)
    muon, adam = make_optimizers(model)
    parts = {"model": model, "muon": muon, "adam": adam}
    state = {"step": 0, "tokens": 0, "seconds": 0.0, "skill": dict.fromkeys(SHARE, 0.0),
             "length": dict(SHORTEST), "log": []}
    state = resume(saved, parts, state) if saved.exists() else state
    corpus, recent = [], []
    for path in gdn.stdlib_files(held_out=False):
        corpus += tokenizer(path.read_text("utf-8", "replace")).input_ids + [tokenizer.eos_token_id]
    corpus, began = torch.tensor(corpus), time.time()
    skill, lengths, before = state["skill"], state["length"], state["seconds"]
    for step in tqdm(range(state["step"], steps), initial=state["step"], total=steps, desc=name):
        rng = Random(f"train {name} {step}")    # 04_ruler.py's seeds begin with a number
        mixed = step >= GROWING[name]
        for group in muon.param_groups + adam.param_groups:
            group["lr"] = group["peak"] * min(1, (step + 1) / 100, (steps - step) / (0.4 * steps))
        length, tasks = choose(name, mixed, rng, skill, lengths)
        window = 4096 if mixed and rng.random() < 0.1 else max(length, 256)
        starts = [rng.randrange(len(corpus) - window) for _ in range(max(TEXT_TOKENS // window, 1))]
        text = torch.stack([corpus[start:start + window] for start in starts])
        ids, marks, right = task_batch(tasks, length, rng, tokenizer)
        losses, wrong = backward(model, text, ids, marks, right, step)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in (muon, adam):
            optimizer.step()
            optimizer.zero_grad()
        assess(name, mixed, tasks, marks, wrong, skill, lengths)
        recent.append(losses)
        state["tokens"] += ids.numel() + text.numel()
        if (step + 1) % EVERY == 0 or step + 1 == steps:
            state |= {"step": step + 1, "seconds": before + time.time() - began}
            means = {kind: round(sum(x[kind] for x in recent) / len(recent), 3) for kind in losses}
            state["log"].append({
                "step": step + 1, "tokens": state["tokens"],
                "minutes": round(state["seconds"] / 60, 1), **means,
                "skill": {task: round(100 * skill[task]) for task in skill},
                "length": dict(lengths)})
            recent = []
            write(out, parts, tokenizer, state)
            if time.time() - began > 60 * minutes:
                break


if __name__ == "__main__":
    gdn.command(train)

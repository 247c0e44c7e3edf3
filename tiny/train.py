"""Trains the two bundled models, tiny/hybrid and tiny/recurrent, from nothing on a laptop's CPU.

    python tiny/train.py recurrent          # about 80 minutes on one core; stops and goes on where it was
    python tiny/train.py hybrid --steps 20  # a look

Both are Qwen3_5ForCausalLM with hidden size 128, three Gated DeltaNet layers of four 64x64 heads and one full-attention
layer: last in `hybrid`, as in Qwen's order, first in `recurrent`, where it sees bare tokens and can retrieve nothing.
They learn Python's standard library (without the files that evaluation holds out) and the tasks of 04_ruler.py.
"""
import importlib.util
import json
import math
import sys
import time
from pathlib import Path
from random import Random

import fire
import torch
import torch.nn.functional as F
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from safetensors.torch import save_file
from tqdm import tqdm
from transformers import PreTrainedTokenizerFast, Qwen3_5ForCausalLM, Qwen3_5TextConfig

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE)]
import fast
import gdn

spec = importlib.util.spec_from_file_location("ruler", HERE.parent / "04_ruler.py")
ruler = importlib.util.module_from_spec(spec)
spec.loader.exec_module(ruler)

LINEAR, FULL = "linear_attention", "full_attention"
ORDER = {"hybrid": [LINEAR, LINEAR, LINEAR, FULL], "recurrent": [FULL, LINEAR, LINEAR, LINEAR]}
LENGTHS = [128, 192, 256, 384, 512, 768, 1024]      # the curriculum: tokens in a sequence
STEP_TOKENS = 3072                                  # task tokens of a step; a third as many again are text
# Share of the training, roughly how many tokens one unit of size takes (a needle, a sentence, a word), shortest sequence.
TASKS = {"niah_multikey_2": (8, 20, 0), "niah_single_1": (2, 7, 0), "niah_multikey_1": (3, 19, 256),
         "niah_multivalue": (1, 19, 256), "niah_multiquery": (1, 19, 256), "vt": (4, 7, 0), "cwe": (5, 5.6, 0),
         "fwe": (4, 2.3, 192)}
MICRO = 1024                                        # tokens in one forward pass: what the processor's cache holds


def make_tokenizer():
    """A byte-level BPE of 4,096 tokens, digits one by one, trained on the training files and the tasks' words."""
    tokenizer = Tokenizer(models.BPE())
    pattern = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(pattern), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    tokenizer.decoder = decoders.ByteLevel()
    rng = Random(0)
    words = (text for _ in range(60) for text in
             (" ".join(ruler.WORDS), ruler.cwe(20, rng, repeats=(6, 1))[0], ruler.fwe(100, rng)[0],
              ruler.vt(5, rng)[0], ruler.niah(20, rng, hay=None)[0], ruler.niah(9, rng)[0]))
    texts = [path.read_text(errors="replace") for path in gdn.stdlib_files(held_out=False)]
    tokenizer.train_from_iterator([*texts, *words], trainers.BpeTrainer(
        vocab_size=4096, special_tokens=["<|endoftext|>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|endoftext|>")


def make_model(name, tokenizer):
    model = Qwen3_5ForCausalLM(Qwen3_5TextConfig(
        vocab_size=len(tokenizer), hidden_size=128, intermediate_size=384, num_hidden_layers=4, layer_types=ORDER[name],
        num_attention_heads=4, num_key_value_heads=2, head_dim=64, max_position_embeddings=4096,
        linear_num_key_heads=4, linear_num_value_heads=4, linear_key_head_dim=64, linear_value_head_dim=64,
        tie_word_embeddings=True, eos_token_id=tokenizer.eos_token_id, dtype="float32"))
    for layer in model.model.layers:
        if layer.block_type == LINEAR:
            # Transformers' default forgets within dozens of tokens everywhere; these gates give horizons of 1 to 10,000.
            gates = layer.linear_attn
            dt = torch.exp(torch.empty(4).uniform_(math.log(1e-3), math.log(1e-1)))
            gates.dt_bias.data.copy_(dt + torch.log(-torch.expm1(-dt)))           # softplus^-1(dt)
            gates.A_log.data.copy_(torch.empty(4).uniform_(math.log(0.1), math.log(8)))
    return model


def task_sequence(task, length, rng, tokenizer):
    """One context with up to five questions, the first exactly in the form of 04_ruler.py.

    Returns ids [T <= length] and marks [T]: 0 in the context, 1 in a question and the answer's prefix, 2 in an answer and
    its end-of-text token.
    """
    def encode(text):
        return tokenizer(text, add_special_tokens=False).input_ids
    unit = TASKS[task][1]
    family = task.split("_")[0]
    room = length - 30
    hops, common, repeats = 4, 10, (6, 1)
    if family == "vt":
        hops = rng.choice([1, 2, 3, 4, 4, 4]) if length >= 192 else rng.choice([1, 2])
        room -= 15 * (hops + 1) + 8 * hops
    elif family == "cwe":
        room -= 25
        repeats = rng.choice([(6, 1), (6, 1), (4, 1), (3, 1)])
        common = min(10, int(0.85 * room / unit / (repeats[0] + 0.35 * 10)))
        room -= common * (repeats[0] * unit + 4)
    elif family == "fwe":
        room -= 40
    questions = rng.randint(1, 5)
    asked = 31 * questions if family == "niah" else 0
    if family == "niah":
        asked = min(asked, length // 2)
        room -= asked + (0 if task == "niah_multikey_2" else 21 * ruler.NIAH[task].get("keys", 1))
    size = max(int(room / unit), 1 if family in ("vt", "cwe") else 2)
    if family == "fwe":
        size = max(size, 40)
    seed = rng.random()
    while True:
        context, found = ruler.build(task, size, Random(seed), length, hops=hops, common=common, repeats=repeats)
        ids, mask = [], []
        for i, (question, prefix, references) in enumerate(found[:5]):
            ask = encode((context if i == 0 else "") + question + prefix)
            answer = encode(" " + " ".join(references)) + [tokenizer.eos_token_id]
            if ids and len(ids) + len(ask) + len(answer) > length:
                break
            ids += ask + answer
            if i == 0:
                begun = len(encode(context))
                mask += [0] * begun + [1] * (len(ask) - begun)
            else:
                mask += [1] * len(ask)
            mask += [2] * len(answer)
        if len(ids) <= length:
            return torch.tensor(ids), torch.tensor(mask)
        if size <= (40 if family == "fwe" else 1):
            return torch.tensor(ids[:length]), torch.tensor(mask[:length])
        size = min(size - 1, int(size * 0.93))


def batch_of_tasks(length, rng, tokenizer):
    """ids and marks [B, length] (see task_sequence; -1 is padding), and the names of the tasks."""
    fitting = {task: share for task, (share, _, shortest) in TASKS.items() if length >= shortest}
    names = rng.choices(list(fitting), list(fitting.values()), k=max(STEP_TOKENS // length, 1))
    ids, marks = torch.zeros(len(names), length, dtype=torch.long), torch.full((len(names), length), -1)
    for row, task in enumerate(names):
        x, mark = task_sequence(task, length, rng, tokenizer)
        ids[row, :len(x)], marks[row, :len(x)] = x, mark
    return ids, marks, names


def loss_at(model, hidden, ids, mask):
    """Cross-entropies [N] and hits [N] of the tokens where mask [B, T] is set, each predicted from the position before."""
    logits = F.linear(hidden[:, :-1][mask[:, 1:]], model.lm_head.weight).float()
    target = ids[:, 1:][mask[:, 1:]]
    return F.cross_entropy(logits, target, reduction="none"), logits.argmax(-1) == target


def save(model, out):
    """config.json and model.safetensors: the matrices rounded to bfloat16, for size; all is loaded and run in float32."""
    weights = {name: p.detach().bfloat16() if p.ndim > 1 else p.detach().clone()
               for name, p in model.state_dict().items() if name != "lm_head.weight"}            # the head is tied
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(out)


def train(name, steps=3800, minutes=None, out=None, threads=1):
    """Train tiny/NAME and write it to OUT.

    Args:
        name: hybrid or recurrent.
        steps: optimiser steps of about 4,096 tokens; the last 40 % with a falling learning rate.
        minutes: stop after so long, with a checkpoint; the next run goes on.
        out: the folder to write (default: tiny/NAME).
        threads: CPU threads.
    """
    torch.set_num_threads(threads)
    out = Path(out or HERE / name)
    out.mkdir(parents=True, exist_ok=True)
    saved = out / "checkpoint.pt"
    torch.manual_seed(0)
    torch.set_flush_denormal(True)      # fast-decaying heads make denormals, which cost the processor half its speed
    fast.patch()
    if (HERE / "hybrid" / "tokenizer.json").exists():
        tokenizer = PreTrainedTokenizerFast.from_pretrained(HERE / "hybrid")
    else:
        tokenizer = make_tokenizer()
    tokenizer.save_pretrained(out)
    model = make_model(name, tokenizer)
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n and "in_proj_a" not in n
                and "in_proj_b" not in n]
    chosen = {id(p) for p in matrices}
    gates = [p for n, p in model.named_parameters() if n.split(".")[-1] in ("A_log", "dt_bias") or "in_proj_a" in n]
    chosen |= {id(p) for p in gates}
    others = [p for p in model.parameters() if id(p) not in chosen]
    optimizers = [torch.optim.Muon(matrices, lr=MUON, weight_decay=0.01, momentum=0.95),
                  torch.optim.AdamW(others, lr=ADAM, betas=(0.9, 0.95), weight_decay=0.0, fused=True),
                  torch.optim.AdamW(gates, lr=GATES, betas=(0.9, 0.95), weight_decay=0.0, fused=True)]
    peak = [MUON, ADAM, GATES]
    text = []
    for path in gdn.stdlib_files(held_out=False):
        text += tokenizer(path.read_text(errors="replace")).input_ids + [tokenizer.eos_token_id]
    text = torch.tensor(text)

    start, level, skill, tokens, seconds, log = 0, 0, {t: 0.0 for t in TASKS}, 0, 0.0, []
    if saved.exists():
        state = torch.load(saved, weights_only=False)
        model.load_state_dict(state["model"])
        for o, s in zip(optimizers, state["optimizers"]):
            o.load_state_dict(s)
        start, level, skill, tokens, seconds, log = (state[k] for k in ("step", "level", "skill", "tokens", "seconds", "log"))
    model.train()
    began = time.time()
    sums = {}
    bar = tqdm(range(start, steps), initial=start, total=steps, desc=name, mininterval=5)
    for step in bar:
        rng = Random(f"train {name} {step}")                 # evaluation's streams are named otherwise: see 04_ruler.py
        decay = min(1.0, (steps - step) / (0.4 * steps))
        for o, p in zip(optimizers, peak):
            for group in o.param_groups:
                group["lr"] = p * min(1.0, (step + 1) / 100) * decay
        late = step >= 0.6 * steps
        length = rng.choice([256, 512, 512, 1024]) if late else LENGTHS[level if rng.random() < 0.7 else rng.randint(0, level)]
        long = late and rng.random() < 0.1
        n_text = 4096 if long else max(length, 256)
        rows = max(1024 // n_text, 1)
        starts = [rng.randrange(len(text) - n_text) for _ in range(rows)]
        x_text = torch.stack([text[i:i + n_text] for i in starts])
        ids, marks, names = batch_of_tasks(length, rng, tokenizer)
        # A quarter of the context's tokens is enough, and the head over the vocabulary is a third of the work.
        skipped = torch.rand(marks.shape, generator=torch.Generator().manual_seed(step)) > 0.25
        masks = [(marks == 0) & ~skipped, marks == 1, marks == 2]
        ce, _ = loss_at(model, model.model(x_text, use_cache=False).last_hidden_state, x_text, torch.ones_like(x_text, dtype=torch.bool))
        text_loss = ce.mean()
        text_loss.backward()
        hits, parts = [], [0.0, 0.0, 0.0]
        for first in range(0, len(ids), max(MICRO // length, 1)):
            rows = slice(first, first + max(MICRO // length, 1))
            hidden = model.model(ids[rows], use_cache=False).last_hidden_state
            loss = 0.0
            for i, (mask, weight) in enumerate(zip(masks, (0.1, 0.5, 1.0))):
                ce, hit = loss_at(model, hidden, ids[rows], mask[rows])
                part = ce.sum() / mask.sum()
                parts[i] += part.item()
                loss = loss + weight * part
            loss.backward()
            hits.append(hit)                                      # the last: the answers'
        hit = torch.cat(hits)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for o in optimizers:
            o.step()
            o.zero_grad(set_to_none=True)
        tokens += ids.numel() + x_text.numel()
        row_of = masks[2][:, 1:].nonzero()[:, 0]
        for row, task in enumerate(names):
            right = hit[row_of == row].float().mean().item()
            if right == right:
                skill[task] = 0.95 * skill[task] + 0.05 * right
        for k, v in zip(("text", "context", "question", "answer"), (text_loss.item(), *parts)):
            sums.setdefault(k, []).append(v)
        # Longer and harder as soon as the needles of this length are mostly found.
        if not late and level + 1 < len(LENGTHS) and skill["niah_multikey_2"] > 0.8 and skill["niah_single_1"] > 0.8:
            level += 1
            skill["niah_multikey_2"] = 0.5                 # measured anew at the new length
        if (step + 1) % 25 == 0 or step + 1 == steps:
            now = seconds + time.time() - began
            line = {"step": step + 1, "tokens": tokens, "minutes": round(now / 60, 1), "length": LENGTHS[level],
                    **{k: round(sum(v) / len(v), 3) for k, v in sums.items()},
                    **{t: round(100 * s) for t, s in skill.items()}}
            log.append(line)
            sums = {}
            (out / "train.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in log))
            bar.set_postfix_str(f"length {LENGTHS[level]} text {line['text']} answer {line['answer']}")
        stop = minutes is not None and time.time() - began > 60 * minutes
        if (step + 1) % 50 == 0 or step + 1 == steps or stop:
            torch.save({"model": model.state_dict(), "optimizers": [o.state_dict() for o in optimizers], "step": step + 1,
                        "level": level, "skill": skill, "tokens": tokens, "seconds": seconds + time.time() - began,
                        "log": log}, saved.with_suffix(".new"))
            saved.with_suffix(".new").replace(saved)
        if stop:
            break


MUON, ADAM, GATES = 0.02, 3e-3, 3e-4
if __name__ == "__main__":
    fire.Fire(train)

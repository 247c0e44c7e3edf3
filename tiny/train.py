"""Trains the bundled models, tiny/hybrid and tiny/recurrent, from nothing on a laptop's CPU.

    python tiny/train.py --name recurrent                       # 85 minutes on one core; stop it, and it goes on where it was
    python tiny/train.py --name hybrid --steps 20 --out /tmp/x  # a look

Both are Qwen3_5ForCausalLM with hidden size 128, three Gated DeltaNet layers of four 64 x 64 heads and one full-attention
layer: last in `hybrid`, as in Qwen's order, first in `recurrent`, where it sees bare tokens and can retrieve nothing.
They learn Python's standard library, without the files that gdn.stdlib_files holds out, and the tasks of 04_ruler.py.
"""
import importlib.util
import json
import math
import sys
import time
from pathlib import Path
from random import Random

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
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
STEPS = {"hybrid": 6400, "recurrent": 4400}
GROWING = {"hybrid": 2500, "recurrent": 2600}            # steps of the curriculum; then all lengths are mixed
ENOUGH = {"hybrid": 0.8, "recurrent": 0.7}               # skill at which the curriculum makes a task longer
LENGTHS = [128, 192, 256, 384, 512]                      # the curriculum: tokens in a sequence
TASK_TOKENS, TEXT_TOKENS = 3072, 1024                    # of a step
MICRO = 1024                                             # tokens in one forward pass: what the processor's cache holds
# A task's share of the sequences, roughly how many tokens one unit of its size takes, and its shortest sequence.
TASKS = {"niah_multikey_2": (6, 20, 128), "niah_single_1": (2, 7, 128), "niah_multikey_1": (2, 19, 256),
         "niah_multivalue": (1, 19, 256), "niah_multiquery": (1, 19, 256), "vt": (3, 7, 128), "cwe": (4, 5.6, 128),
         "fwe": (4, 2.3, 192)}
ANY_ORDER = ("niah_multivalue", "cwe", "fwe")            # whose references are right in any order
WEIGHTS = {"context": 0.1, "question": 0.5, "answer": 1.0}       # of the mean losses of a task's tokens; text has 1


# ---- tokenizer and model ---------------------------------------------------------------------------------------------

def make_tokenizer():
    """A byte-level BPE of 4,096 tokens, digits one by one as in Qwen's, of the training files and the tasks' words."""
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
            # Transformers' default forgets within dozens of tokens everywhere; these gates start with horizons of 1 to
            # 10,000 tokens: dt log-uniform in 0.001...0.1, A log-uniform in 0.1...8.
            gates = layer.linear_attn
            dt = torch.exp(torch.empty(4).uniform_(math.log(1e-3), math.log(1e-1)))
            gates.dt_bias.data.copy_(dt + torch.log(-torch.expm1(-dt)))           # softplus^-1(dt)
            gates.A_log.data.copy_(torch.empty(4).uniform_(math.log(0.1), math.log(8)))
    return model


def make_optimizers(model):
    """Muon for the matrices, AdamW for the rest, and AdamW at a tenth for the decay gates, or they forget how to carry."""
    named = dict(model.named_parameters())
    gates = [n for n in named if n.endswith(("A_log", "dt_bias", "in_proj_a.weight"))]
    matrices = [n for n, p in named.items() if p.ndim == 2 and "embed" not in n and "in_proj_b" not in n and n not in gates]
    others = [n for n in named if n not in gates and n not in matrices]
    adam = dict(betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    optimizers = [torch.optim.Muon([named[n] for n in matrices], lr=0.02, weight_decay=0.01, momentum=0.95),
                  torch.optim.AdamW([named[n] for n in others], lr=3e-3, **adam),
                  torch.optim.AdamW([named[n] for n in gates], lr=3e-4, **adam)]
    return optimizers, [optimizer.param_groups[0]["lr"] for optimizer in optimizers]


def save(model, tokenizer, out):
    """A checkpoint like any other. The matrices are rounded to bfloat16 for size; it is loaded and run in float32."""
    weights = {name: p.detach().bfloat16() if p.ndim > 1 else p.detach().clone()
               for name, p in model.state_dict().items() if name != "lm_head.weight"}            # the head is tied
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(out)
    tokenizer.save_pretrained(out)


# ---- data ------------------------------------------------------------------------------------------------------------

def task_sequence(task, length, rng, tokenizer):
    """One context with up to five questions, the first exactly in the form of 04_ruler.py.

    Returns ids [T <= length]; marks [T]: 0 in the context, 1 in a question and the answer's prefix, 2, 3, ... in the first,
    second, ... reference of the answers, end-of-text token included; and {position: tokens that are right there}, for
    where another word of the answer could as well come next. Short sequences get easier tasks: fewer needles, hops,
    common words and repeats.
    """
    def encode(text):
        return tokenizer(text, add_special_tokens=False).input_ids

    family, unit, room = ruler.family(task), TASKS[task][1], length - 30
    hops, common, repeats = 4, 10, (6, 1)
    if family == "vt":
        hops = rng.choice([1, 2, 3, 4, 4, 4]) if length >= 192 else rng.choice([1, 2])
        room -= 15 * (hops + 1) + 8 * hops
    elif family == "cwe":
        room -= 25
        repeats = rng.choice([(6, 1), (6, 1), (4, 1), (3, 1)])
        common = min(10, int(0.9 * room / unit / (repeats[0] + 1.2)))
        room -= common * (repeats[0] * unit + 4)
    elif family == "fwe":
        room -= 40
    questions = rng.randint(1, 5)
    if family == "niah":
        room -= min(31 * questions, length // 2)
        room -= 0 if task == "niah_multikey_2" else 21 * ruler.NIAH[task].get("keys", 1)
    smallest = {"vt": 1, "cwe": 1, "fwe": 40, "niah": 2}[family]
    size, seed = max(int(room / unit), smallest), rng.random()
    while True:
        context, found = ruler.build(task, size, Random(seed), length, hops=hops, common=common, repeats=repeats)
        ids, marks, right = [], [], {}
        for i, (question, prefix, references) in enumerate(found[:5]):
            ask = encode((context if i == 0 else "") + question + prefix)
            if task in ANY_ORDER:
                references = rng.sample(references, len(references))
            words = [encode(" " + reference) for reference in references]
            if ids and len(ids) + len(ask) + sum(map(len, words)) + 1 > length:
                break
            before = len(encode(context)) if i == 0 else 0
            ids += ask
            marks += [0] * before + [1] * (len(ask) - before)
            for n, word in enumerate(words):
                for j in range(len(word) if task in ANY_ORDER else 0):
                    right[len(ids) + j] = [w[j] for w in words[n:] if len(w) > j and w[:j] == word[:j]]
                word = word + [tokenizer.eos_token_id] * (n + 1 == len(words))
                ids, marks = ids + word, marks + [max(*marks, 1) + 1] * len(word)
        if len(ids) <= length or size <= max(smallest - 1, 1):
            return torch.tensor(ids[:length]), torch.tensor(marks[:length]), right
        size = min(size - 1, int(size * 0.93))


def task_batch(names, length, rng, tokenizer):
    """ids and marks [B, length] (see task_sequence; -1 is padding) of the named tasks, and right [B, length, 10]: the
    tokens that are right at a position, the one in ids among them."""
    ids, marks = torch.zeros(len(names), length, dtype=torch.long), torch.full((len(names), length), -1)
    also = []
    for row, task in enumerate(names):
        x, mark, others = task_sequence(task, length, rng, tokenizer)
        ids[row, :len(x)], marks[row, :len(x)] = x, mark
        also += [(row, position, i, token) for position, tokens in others.items() if position < length
                 for i, token in enumerate(tokens)]
    marks[:, 0] = -1                                                # nothing predicts the first token
    right = ids[:, :, None].repeat(1, 1, 10)
    for row, position, i, token in also:
        right[row, position, i] = token
    return ids, marks, right


def text_batch(length, rng, text):
    """Windows [B, length] of the training text, about TEXT_TOKENS tokens."""
    starts = [rng.randrange(len(text) - length) for _ in range(max(TEXT_TOKENS // length, 1))]
    return torch.stack([text[i:i + length] for i in starts])


# ---- training --------------------------------------------------------------------------------------------------------

def loss_at(model, hidden, right, mask):
    """Losses [N] and hits [N] of the tokens where mask [B, T] is set, each predicted from the position before: minus the
    logarithm of the probability of all that is right there, right [B, T] or [B, T, choices]."""
    logits = F.linear(hidden[:, :-1][mask[:, 1:]], model.lm_head.weight)
    right = right[:, 1:][mask[:, 1:]]
    if right.ndim == 1:
        return F.cross_entropy(logits, right, reduction="none"), logits.argmax(-1) == right
    allowed = torch.zeros_like(logits, dtype=torch.bool).scatter(1, right, True)
    return (logits.logsumexp(-1) - logits.masked_fill(~allowed, -math.inf).logsumexp(-1),
            allowed.gather(1, logits.argmax(-1, keepdim=True))[:, 0])


def backward(model, x_text, ids, marks, right, step):
    """Add the gradients of one step: mean over text + mean over answers + 0.5 mean over questions + 0.1 mean over contexts,
    where each sequence's answers weigh the same.

    Returns the four losses, and which tokens [B, T] are answers and not right.
    """
    text, _ = loss_at(model, model.model(x_text, use_cache=False).last_hidden_state, x_text, torch.ones_like(x_text) > 0)
    text.mean().backward()
    # A quarter of the contexts' tokens is enough, and the head over the vocabulary is a third of the work.
    skipped = torch.rand(marks.shape, generator=torch.Generator().manual_seed(step)) > 0.25
    masks = {"context": (marks == 0) & ~skipped, "question": marks == 1, "answer": marks >= 2}
    shares = {kind: mask / mask.sum() for kind, mask in masks.items()}
    shares["answer"] = masks["answer"] / masks["answer"].sum(1, keepdim=True).clamp(min=1) / len(ids)
    losses, wrong = {"text": text.mean().item(), **dict.fromkeys(WEIGHTS, 0.0)}, torch.zeros_like(marks, dtype=torch.bool)
    rows = max(MICRO // ids.shape[1], 1)
    for part in (slice(i, i + rows) for i in range(0, len(ids), rows)):
        hidden, total = model.model(ids[part], use_cache=False).last_hidden_state, 0.0
        for kind, weight in WEIGHTS.items():
            mask = masks[kind][part]
            loss, hit = loss_at(model, hidden, (right if kind == "answer" else ids)[part], mask)
            mean = (loss * shares[kind][part][mask]).sum()
            losses[kind] += mean.item()
            total = total + weight * mean
        total.backward()
        wrong[part][masks["answer"][part]] = ~hit
    return losses, wrong


def train(*, name="recurrent", steps=None, out=None, minutes=None):
    """Train a bundled model and write its checkpoint, tokenizer and train.jsonl, a log of losses and skill.

    Args:
        name: hybrid or recurrent.
        steps: optimiser steps of about 4,096 tokens, the last 40 % with a falling learning rate (6,400 and 4,400).
        out: the folder to write; tiny/NAME by default.
        minutes: stop after so long; the next run goes on from the folder's checkpoint.pt.
    """
    if name not in ORDER:
        raise gdn.Error(f"the bundled models are {' and '.join(ORDER)}, not {name!r}")
    if not isinstance(minutes, (int, float, type(None))):
        raise gdn.Error(f"--minutes is a number, not {minutes!r}")
    steps, out = STEPS[name] if steps is None else gdn.whole("steps", steps), Path(str(out or HERE / name))
    out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)      # fast-decaying heads make denormals, which cost the processor half its speed
    torch.manual_seed(0)
    fast.patch()
    saved = out / "checkpoint.pt"
    tokenizer = PreTrainedTokenizerFast.from_pretrained(out) if saved.exists() else make_tokenizer()
    model = make_model(name, tokenizer).train()
    optimizers, peaks = make_optimizers(model)
    text = [i for path in gdn.stdlib_files(held_out=False)
            for i in (*tokenizer(path.read_text(errors="replace")).input_ids, tokenizer.eos_token_id)]
    text = torch.tensor(text)

    # Skill is a running share of references right, by task, where all that comes before is given; level is the curriculum's.
    state = {"step": 0, "skill": dict.fromkeys(TASKS, 0.0), "tokens": 0, "seconds": 0.0, "log": [],
             "level": {task: LENGTHS.index(shortest) for task, (_, _, shortest) in TASKS.items()}}
    if saved.exists():
        loaded = torch.load(saved, weights_only=False)
        model.load_state_dict(loaded.pop("model"))
        for optimizer, values in zip(optimizers, loaded.pop("optimizers")):
            optimizer.load_state_dict(values)
        state = loaded
    skill, level, since, recent, began = state["skill"], state["level"], state["seconds"], [], time.time()
    bar = tqdm(range(state["step"], steps), initial=state["step"], total=steps, desc=name, mininterval=5)
    for step in bar:
        rng = Random(f"train {name} {step}")                        # 04_ruler.py seeds its samples by number, never so
        mixed = step >= GROWING[name]
        for optimizer, peak in zip(optimizers, peaks):
            optimizer.param_groups[0]["lr"] = peak * min(1, (step + 1) / 100, (steps - step) / (0.4 * steps))
        # A task comes as often as it has a share and as its references are wrong.
        # `recurrent` finds no needle for long unless all is short at first: nothing gets longer than its needles do.
        longest = LENGTHS[level["niah_multikey_2"]] if name == "recurrent" and not mixed else LENGTHS[-1]
        fitting = {task: share * (1.1 - skill[task]) for task, (share, _, shortest) in TASKS.items() if shortest <= longest}
        if mixed:
            length = rng.choice([192, 256, 384, 512, 512, 1024])
            fitting = {task: need for task, need in fitting.items() if TASKS[task][2] <= length}
        else:
            top = level[rng.choices(list(fitting), list(fitting.values()))[0]]
            length = min(LENGTHS[top if rng.random() < 0.7 else rng.randint(0, top)], longest)
            fitting = {task: need for task, need in fitting.items() if TASKS[task][2] <= length <= LENGTHS[level[task]]}
        names = rng.choices(list(fitting), list(fitting.values()), k=TASK_TOKENS // length)
        x_text = text_batch(4096 if mixed and rng.random() < 0.1 else max(length, 256), rng, text)
        ids, marks, right = task_batch(names, length, rng, tokenizer)
        losses, wrong = backward(model, x_text, ids, marks, right, step)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()

        for row, task in enumerate(names):
            references = marks[row].max().item() - 1
            if references > 0 and (mixed or length == LENGTHS[level[task]]):
                right_ones = references - marks[row][wrong[row]].unique().numel()
                skill[task] += 0.05 * (right_ones / references - skill[task])
            # Longer and harder as soon as most references of this length are right, by competence and not by the clock.
            if not mixed and skill[task] > ENOUGH[name] and level[task] + 1 < len(LENGTHS):
                level[task] += 1
                skill[task] = 0.5                                   # measured anew at the new length
        state["tokens"] += ids.numel() + x_text.numel()
        state["step"], state["seconds"] = step + 1, since + time.time() - began
        recent.append(losses)
        last = step + 1 == steps or (minutes is not None and time.time() - began > 60 * minutes)
        if (step + 1) % 25 == 0 or last:
            means = {kind: round(sum(one[kind] for one in recent) / len(recent), 3) for kind in losses}
            state["log"].append({"step": step + 1, "tokens": state["tokens"], "minutes": round(state["seconds"] / 60, 1),
                                 **means, "skill": {task: round(100 * share) for task, share in skill.items()},
                                 "length": {task: LENGTHS[i] for task, i in level.items()}})
            (out / "train.jsonl").write_text("".join(json.dumps(line) + "\n" for line in state["log"]))
            bar.set_postfix_str(f"text {means['text']} answer {means['answer']}")
            recent = []
        if (step + 1) % 50 == 0 or last:
            whole = {**state, "model": model.state_dict(), "optimizers": [o.state_dict() for o in optimizers]}
            gdn.write_whole(saved, lambda temporary: torch.save(whole, temporary))
            save(model, tokenizer, out)
        if last:
            break


if __name__ == "__main__":
    gdn.command(train)

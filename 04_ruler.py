"""Tasks in the style of RULER with every GDN state cut back to its top r singular modes at each boundary.

    python 04_ruler.py                                                    # the bundled model
    python 04_ruler.py --model Qwen/Qwen3.5-0.8B --tasks vt,cwe --lengths 65536 --ranks 32,24,12 --samples 50

The prompt and the greedy answer run as one batch, a row per rank and the untouched model as row 0, so each change in
score is paired by sample. The tasks follow RULER (Hsieh et al. 2024, "RULER: What's the Real Context Size of Your
Long-Context Language Models?", section 3 and appendix); every sentence of the prompts is this file's own. Prompts made
by RULER's own generator run through --data.
"""
import hashlib
import json
import math
import os
import string
import time
from pathlib import Path
from random import Random

import torch
from tqdm import tqdm
from transformers import DynamicCache
from wonderwords import RandomWord

import gdn

# ---- the tasks: each builder returns a context and the questions that can be asked about it -------------------------
#
# A builder takes a size (how many sentences, needles or words) and a sample's random stream. What it makes for a size
# holds about what it makes for a smaller one, so the number of tokens grows with the size, and `make_sample` can search
# for the size that fills the asked length. A question is (text, answer prefix, reference strings).

_lists = RandomWord()._categories
NOUNS, VERBS, ADJECTIVES = (sorted(w for w in set(_lists[c]) if w.isalpha() and w.islower())
                            for c in ("noun", "verb", "adjective"))
WORDS = sorted({*NOUNS, *VERBS, *ADJECTIVES})

NEW_TOKENS = {"niah": 128, "vt": 30, "cwe": 120, "fwe": 50, "qa": 32}     # RULER's budget for the answer, by task family

FILLER = ("The river is wide.", "The road is long.", "The night is quiet.", "We walk on and come back.")
PROSE = ("The {a} {n} was ready to {v} with the {m}.", "Nobody could {v} the {n} before the {m} arrived.",
         "It takes a {a} {n} to {v} a {m}.", "When the {n} began to {v}, the {m} stayed {a}.",
         "They had to {v} every {n}, and even the {m} looked {a}.", "A {a} {n} will seldom {v} near a {m}.",
         "She put the {n} beside the {m} and went to {v}.", "To {v} was easy once the {n} felt {a}.")


def filler(size, rng):
    return [FILLER[i % len(FILLER)] for i in range(size)]


def prose(size, rng):
    """Grammatical sentences of random words: prose without end, the same on every machine, with no digit in it."""
    return [rng.choice(PROSE).format(a=rng.choice(ADJECTIVES), n=rng.choice(NOUNS), m=rng.choice(NOUNS),
                                     v=rng.choice(VERBS)) for _ in range(size)]


def number(rng, digits=7):
    return str(rng.randrange(10 ** (digits - 1), 10 ** digits))


def uuid(rng):
    h = f"{rng.getrandbits(128):032x}"
    return "-".join((h[:8], h[8:12], h[12:16], h[16:20], h[20:]))


def word_key(rng):
    return f"{rng.choice(ADJECTIVES)}-{rng.choice(NOUNS)}"


def distinct(make, n, rng):
    """n different results of make(rng), in the order they came."""
    found = {}
    while len(found) < n:
        found[make(rng)] = None
    return list(found)


def scatter(hay, needles, rng):
    """The needles between the sentences of the hay, in their order, at uniformly random places."""
    places = sorted(int(rng.random() * (len(hay) + 1)) for _ in needles)
    for place, needle in zip(reversed(places), reversed(needles)):
        hay.insert(place, needle)
    return hay


def join_and(parts):
    return parts[0] if len(parts) == 1 else ", ".join(parts[:-1]) + " and " + parts[-1]


def niah(size, rng, hay=prose, key=word_key, value=number, keys=1, values=1, queries=1):
    """Needles in a haystack. hay=None: nothing but needles, `size` of them."""
    hay_rng, key_rng, value_rng, place_rng = (Random(rng.random()) for _ in range(4))
    if hay is None:
        keys = size
    names = distinct(key, keys, key_rng)
    codes = distinct(value, keys * values, value_rng)
    codes = {name: codes[i * values:(i + 1) * values] for i, name in enumerate(names)}
    needles = [f"The code of {name} is {code}." for name in names for code in codes[name]]
    rng.shuffle(needles)
    text = needles if hay is None else scatter(hay(size, hay_rng), needles, place_rng)
    asked = rng.sample(names, len(names))
    questions = []
    for i in range(0, len(asked) - queries + 1, queries):
        who = join_and(asked[i:i + queries])
        refs = [code for name in asked[i:i + queries] for code in codes[name]]
        what, verb = ("code", "is") if len(refs) == 1 else ("codes", "are")
        questions.append((f"What {verb} the {what} of {who}?", f" The {what} of {who} {verb}", refs))
    return "Keep in mind the codes in this text.\n" + " ".join(text) + "\n", questions


def vt(size, rng, hops=4, avoid=()):
    """Variable tracking: a chain of assignments, each variable taking the one before it, spread through filler."""
    names = [name for name in distinct(lambda r: "".join(r.choices(string.ascii_uppercase, k=5)), hops + 1 + len(avoid), rng)
             if name not in avoid][:hops + 1]
    value = next(v for v in distinct(lambda r: number(r, 5), 1 + len(avoid), rng) if v not in avoid)
    lines = [f"VAR {names[0]} = {value}."] + [f"VAR {b} = VAR {a}." for a, b in zip(names, names[1:])]
    text = scatter(filler(size, rng), lines, rng)
    return ("Follow the variables in this text.\n" + " ".join(text) + "\n",
            [(f"Which variables hold {value}?", f" The {hops + 1} variables that hold {value} are", names)])


def cwe(size, rng, common=10, repeats=(30, 3), avoid=()):
    """Common words: a numbered list in which `common` words come repeats[0] times, `size` others repeats[1] times."""
    def clash(word, others):                                      # one standing inside the other would be scored for it
        return any(word in other or other in word for other in others)

    asked, pool = [], [word for word in rng.sample(WORDS, len(WORDS)) if word not in avoid]
    for word in pool:
        if len(asked) < common and not clash(word, [*asked, *avoid]):
            asked.append(word)
    rest = [word for word in pool if not clash(word, asked)][:size]
    if len(rest) < size:                                          # a long list needs more words than there are: pairs
        rest += [pair for pair in distinct(word_key, 2 * size, rng) if not clash(pair, asked)][:size - len(rest)]
    words = asked * repeats[0] + rest * repeats[1]
    rng.shuffle(words)
    return ("Count the words in this list.\n" + "\n".join(f"{i} {word}" for i, word in enumerate(words, 1)) + "\n",
            [(f"Which {common} words are the most common in the list?",
              f" The {common} most common words in the list are", sorted(asked, key=words.index))])


def fwe(size, rng, vocabulary=10):
    """Frequent words: `size` invented words, the k-th most frequent with a share of k^-2 / zeta(2); the first is dots."""
    coded = distinct(lambda r: "".join(r.choices(string.ascii_lowercase, k=6)), vocabulary, rng)
    counts = [int(size * 6 / math.pi ** 2 / k ** 2) for k in range(1, vocabulary + 1)]
    words = [word for word, n in zip(["...", *coded[1:]], counts) for _ in range(n)]
    rng.shuffle(words)
    return ("Count the words in this coded text. Ignore the dots.\n" + " ".join(words) + "\n",
            [("Which 3 words are the most frequent in the text?", " The 3 most frequent words in the text are",
              coded[1:4])])


NIAH = {"niah_single_1": dict(hay=filler), "niah_single_2": {}, "niah_single_3": dict(value=uuid),
        "niah_multikey_1": dict(keys=4), "niah_multikey_2": dict(hay=None),
        "niah_multikey_3": dict(hay=None, key=uuid, value=uuid),
        "niah_multivalue": dict(values=4), "niah_multiquery": dict(keys=4, queries=4)}
TASKS = (*NIAH, "vt", "cwe", "fwe")
SMALLEST = {"niah": 2, "vt": 1, "cwe": 3, "fwe": 75}     # below 75 words the fourth and fifth can be equally frequent


def build(task, size, rng, length, hops=4, common=10, repeats=None):
    """The context of the given size for a task at a length, and its questions. From 2,048 tokens on, vt and cwe begin
    with a solved example; below 4,096 cwe repeats its words less."""
    if task in NIAH:
        return niah(size, rng, **NIAH[task])
    if task == "fwe":
        return fwe(size, rng, vocabulary=max(length // 50, 4))
    short, example, avoid = length < 4096, "", ()
    if length >= 2048:
        text, [(ask, prefix, answer)] = vt(4, rng) if task == "vt" else cwe(*((10, rng, 10, (3, 1)) if short else
                                                                            (30, rng, 10, (10, 3))))
        example, avoid = f"{text}{ask}{prefix} {' '.join(answer)}\n\n", {*text.split(), *ask.strip("?").split()}
    context, questions = (vt(size, rng, hops, avoid) if task == "vt" else
                          cwe(size, rng, common, repeats or ((6, 1) if short else (30, 3)), avoid))
    return example + context, questions


def family(task):
    return task.split("_")[0]


# ---- samples of an asked length ----------------------------------------------------------------------------------------

def make_sample(task, length, index, seed, tokenizer, size=None):
    """Sample `index` of a task: a pure function of these arguments, the largest that the length holds (or of that size).

    Returns {"prompt", "references"}, the prompt with its answer prefix, and the tokens that it and the answer may take.
    """
    def of_size(size):
        context, [(ask, prefix, references), *_] = build(task, size, Random(f"{seed} {task} {length} {index}"), length)
        prompt = context + ask + prefix
        return {"prompt": prompt, "references": references}, len(tokenizer(prompt).input_ids) + NEW_TOKENS[family(task)]

    if size is not None:
        return of_size(size)
    low, step = SMALLEST[family(task)], 1                         # the number of tokens grows with the size: double,
    while of_size(low + step)[1] <= length:                        # then halve
        low, step = low + step, 2 * step
    while step > 1:
        step //= 2
        if of_size(low + step)[1] <= length:
            low += step
    return of_size(low)


def upstream_samples(path, count=math.inf):
    """The first samples of a file that RULER's own generator wrote: its prompts as they are, with the prefix appended."""
    samples = []
    for number, line in enumerate(gdn.read_text(path).split("\n"), 1):
        if line.strip() and len(samples) < count:
            try:
                row = json.loads(line)
                prompt, outputs, length = row["input"] + row["answer_prefix"], row["outputs"], row["length"]
                prompt = prompt.encode(errors="replace").decode()                         # no lone surrogates
                if not isinstance(outputs, list) or not outputs or not all(isinstance(o, str) and o for o in outputs):
                    raise TypeError("outputs is no list of strings")
                if not isinstance(length, int) or length < 1 or not prompt:
                    raise TypeError("the prompt is empty, or length is no whole number from 1 up")
            except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
                raise gdn.Error(f"{path}, line {number}: not a RULER sample with input, answer_prefix, outputs and length "
                                f"({type(error).__name__}: {error})") from None
            samples.append({"prompt": prompt, "references": outputs, "length": length})
    if not samples:
        raise gdn.Error(f"{path} holds no sample")
    return samples


# ---- generation and score ----------------------------------------------------------------------------------------------

def generate(net, layers, ids, ranks, segment, new_tokens, stop, timing):
    """Greedy answers to one prompt ids [1, T], a row per rank (None: untouched): a list of token lists, without the stop.

    Boundaries are counted from the first token of the prompt and go on through the answer. The head sees one position.
    """
    def at_boundary(position, cache):
        gdn.truncate_rows(cache, layers, ranks)

    cache, position = DynamicCache(config=net.config), 0
    answers, open_rows, feed = [[] for _ in ranks], set(range(len(ranks))), ids.expand(len(ranks), -1)       # [R, T]
    while True:
        for _, hidden in gdn.segments(net, feed, segment, at_boundary, cache, position, timing):
            pass
        position += feed.shape[1]
        with torch.inference_mode(), gdn.stopwatch(timing, "model", ids.device):
            feed = net.get_output_embeddings()(hidden[:, -1:]).argmax(-1)                                     # [R, 1]
        for row, token in enumerate(feed[:, 0].tolist()):
            if row in open_rows:
                if token in stop:
                    open_rows.remove(row)
                else:
                    answers[row].append(token)
        if not open_rows or position - ids.shape[1] + 1 >= new_tokens:
            return answers


def score(task, output, references):
    """RULER's recall in points: the share of references that occur in the output, case-insensitive. For qa, where the
    references are wordings of one answer, whether any of them does."""
    found = [reference.lower() in output.lower() for reference in references]
    return 100.0 * (any(found) if family(task) == "qa" else sum(found) / len(found))


# ---- the run -----------------------------------------------------------------------------------------------------------

def plan(tasks, lengths, data):
    """What to run: {(task, length): a file of RULER's or None}."""
    if data is None:
        tasks = TASKS if tasks == "all" else gdn.listed("tasks", tasks, TASKS)
        return {(task, length): None for task in tasks for length in gdn.whole_numbers("lengths", lengths)}
    known, path = (*TASKS, "qa_1", "qa_2"), Path(os.path.expanduser(data))
    if os.path.isdir(path):
        files = {file.parent.name: file for file in sorted(path.glob("*/validation.jsonl"))}
        chosen = list(files) if tasks in (DEFAULT_TASKS, "all") else gdn.listed("tasks", tasks, known)
        for task in chosen:
            if task not in files or task not in known:
                raise gdn.Error(f"--data {data} has {', '.join(files) or 'no task/validation.jsonl'}: there is no {task} "
                                f"to run" if task not in files else f"{files[task]}: {task} is no task of RULER's")
        files = {task: files[task] for task in chosen}
    elif os.path.isfile(path):
        chosen = [path.parent.name] if tasks == DEFAULT_TASKS else gdn.listed("tasks", tasks, known)
        if len(chosen) != 1 or chosen[0] not in known:
            raise gdn.Error(f"--data {data} is one file: name its task with --tasks, one of {', '.join(known)}")
        files = {chosen[0]: path}
    else:
        raise gdn.Error(f"--data {data}: there is no such file or folder")
    if not files:
        raise gdn.Error(f"--data {data} has no task/validation.jsonl")
    label = None if lengths == DEFAULT_LENGTHS else gdn.whole_numbers("lengths", lengths)
    if label and len(label) > 1:
        raise gdn.Error("--lengths names the one length that the files of --data were made for")
    return {(task, label[0] if label else max(s["length"] for s in upstream_samples(file))): file
            for task, file in files.items()}


def read_record(path):
    """The result file of an earlier run, {} if there is none; an Error if it is damaged."""
    if not path.exists():
        return {}
    try:
        record = gdn.read_json(path)
        [0.0 + seconds for seconds in record["timing"].values()]
        [0.0 + sample["scores"][name] for sample in record["results"]["samples"] for name in sample["scores"]]
        if not isinstance(record["model"], str) or not record["arguments"].get("ranks") or len(record["timing"]) != 4 \
                or not record["environment"].get("torch"):
            raise TypeError
        return record
    except (KeyError, TypeError, AttributeError):
        raise gdn.Error(f"{path} is damaged: delete it to start over") from None


DEFAULT_TASKS, DEFAULT_LENGTHS, DEFAULT_RANKS = "niah_single_1,niah_multikey_2,vt,cwe,fwe", "512", "32,12,6,3,1"


def main(*, model="tiny", tasks=DEFAULT_TASKS, lengths=DEFAULT_LENGTHS, samples=50, ranks=DEFAULT_RANKS, seed=0, data=None,
         segment=256, rows=None, device="auto", dtype="auto", results="results"):
    """Score RULER-style tasks with the states truncated at every boundary of prompt and answer.

    Args:
        model: a bundled model (tiny, tiny/hybrid, tiny/recurrent), a folder, or a Hugging Face hub id.
        tasks: RULER's names with commas, or all: niah_single_1 _2 _3, niah_multikey_1 _2 _3, niah_multivalue,
            niah_multiquery, vt, cwe, fwe; with --data also qa_1 and qa_2. By default niah_single_1, niah_multikey_2, vt,
            cwe and fwe.
        lengths: tokens of prompt and answer together, with commas; with --data, the one length that it was made for (the
            longest of its samples by default).
        samples: how many prompts of each task and length.
        ranks: modes to keep, with commas; the untouched model runs beside them.
        seed: of the samples.
        data: a .jsonl of RULER's own generator, or a folder of task/validation.jsonl, instead of prompts made here.
        segment: tokens between boundaries.
        rows: at most so many ranks side by side, if memory is short, with the same results up to rounding; all of them
            by default.
        device: auto, cpu, cuda, cuda:1, ...
        dtype: auto (the checkpoint's own), float32, bfloat16 or float16.
        results: the folder to write to.
    """
    arguments = dict(locals())
    for flag, low in (("samples", 1), ("seed", 0)):
        gdn.whole(flag, arguments[flag], low)
    folder = gdn.check_run(arguments)
    arguments["ranks"] = ranks = gdn.check_ranks(ranks, model, DEFAULT_RANKS)
    groups = gdn.row_groups([None, *ranks], rows)
    todo = plan(tasks, lengths, data)
    tokenizer = gdn.load_tokenizer(model)
    for (task, length), file in todo.items():
        shortest = length
        while file is None and (needed := max(make_sample(task, shortest, i, seed, tokenizer, SMALLEST[family(task)])[1]
                                              for i in range(samples))) > shortest:
            shortest = needed                                     # whose samples are others: look at them too
        if shortest > length:
            raise gdn.Error(f"--lengths {length} is too short for {task}: the shortest that works with this tokenizer is "
                            f"{shortest}")
        if file is None and length - NEW_TOKENS[family(task)] <= segment:
            raise gdn.Error(f"--lengths {length} leaves {task} no prompt beyond the first boundary of --segment {segment}: "
                            f"nothing would be truncated")
    files = {}
    for (task, length), file in todo.items():
        same = {"model": model, "ranks": ranks, "seed": seed, "segment": segment, "dtype": dtype,
                "data_sha256": file and hashlib.sha256(file.read_bytes()).hexdigest()}
        path = folder / "04_ruler" / f"{task}_{length}.json"
        record = read_record(path)
        gdn.check_same(path, record, same)
        files[task, length] = path, same, record
    net, tokenizer, layers = gdn.begin("04_ruler", arguments)
    environment = gdn.environment(net)
    for path, _, record in files.values():
        gdn.check_same(path, record, {"weights": environment["weights"]})
    stop = net.generation_config.eos_token_id
    stop = {tokenizer.eos_token_id, *(stop if isinstance(stop, list) else [stop])}
    for (task, length), file in todo.items():
        path, same, record = files[task, length]
        given = upstream_samples(file, samples) if file else None
        total = len(given) if given else samples
        done = record["results"]["samples"] if record else []
        seconds = record["timing"] if record else dict.fromkeys(
            ("tokens_per_second", "model_seconds", "truncate_seconds", "total_seconds"), 0.0)
        tokens = seconds["tokens_per_second"] * seconds["total_seconds"]
        bar = tqdm(range(len(done), total), desc=f"{task} {length}", initial=min(len(done), total), total=total, unit="sample")
        for index in bar:
            sample = given[index] if given else make_sample(task, length, index, seed, tokenizer)[0]
            timing, start = {"model": 0.0, "boundary": 0.0}, time.perf_counter()
            ids = tokenizer(sample["prompt"], return_tensors="pt").input_ids.to(net.device)
            answers = []
            for group in groups:
                answers += generate(net, layers, ids, group, segment, NEW_TOKENS[family(task)], stop, timing)
            outputs = dict(zip(["full", *map(str, ranks)],
                               tokenizer.batch_decode(answers, skip_special_tokens=True)))
            done.append({"references": sample["references"], "outputs": outputs,
                         "scores": {name: score(task, text, sample["references"]) for name, text in outputs.items()}})
            tokens += sum(ids.shape[1] + len(answer) for answer in answers)
            seconds = {"model_seconds": seconds["model_seconds"] + timing["model"],
                       "truncate_seconds": seconds["truncate_seconds"] + timing["boundary"],
                       "total_seconds": seconds["total_seconds"] + time.perf_counter() - start}
            seconds["tokens_per_second"] = tokens / seconds["total_seconds"]
            scores = {name: [d["scores"][name] for d in done] for name in outputs}
            change = {str(r): gdn.mean_se([a - b for a, b in zip(scores[str(r)], scores["full"])]) for r in ranks}
            gdn.write_json(path, {
                "script": "04_ruler", "model": model,
                "arguments": {**json.loads(json.dumps(arguments)), **same, "task": task, "length": length},
                "environment": environment, "timing": seconds,
                "results": {"layers": layers, "state": gdn.state_shape(net), "samples": done, "change": change}})
            bar.set_postfix_str(" ".join(f"{name}:{sum(s) / len(s):.0f}" for name, s in scores.items()))
    print(f"{'task':<16} {'length':>7} {'samples':>7} {'full':>6}   change in points ± standard error at rank")
    for path, *_ in files.values():
        record = gdn.read_json(path)
        done = record["results"]["samples"]
        print(f"{record['arguments']['task']:<16} {record['arguments']['length']:>7} {len(done):>7} "
              f"{sum(d['scores']['full'] for d in done) / len(done):6.1f}   "
              + "   ".join(f"{rank}: {c['mean']:+.1f}" + ("" if c["se"] is None else f" ± {c['se']:.1f}")
                           for rank, c in record["results"]["change"].items()))
    print(path.parent)


if __name__ == "__main__":
    gdn.command(main)

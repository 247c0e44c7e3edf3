"""Tasks in the style of RULER with every GDN state cut back to its top r modes at each boundary.

    python 04_ruler.py                                                # the bundled model
    python 04_ruler.py --model Qwen/Qwen3.5-0.8B --tasks vt,cwe --lengths 65536 --samples 50
    python 04_ruler.py --model Qwen/Qwen3.5-0.8B --data FOLDER        # prompts of RULER's own

The prompt and the greedy answer run as one batch, a row per rank and the untouched model as row 0,
so each change in score is paired by sample. The tasks follow RULER in numbers (Hsieh et al. 2024,
"RULER: What's the Real Context Size of Your Long-Context Language Models?", section 3 and
appendix); every sentence of the prompts is this file's own.
"""
import hashlib
import json
import math
import os
import re
import string
from itertools import takewhile
from pathlib import Path
from random import Random
from uuid import UUID

import gdn
import torch
from transformers import DynamicCache
from wonderwords import RandomWord

# ---- the tasks: each makes a context and the questions that can be asked about it ---------------
#
# A task takes a size (sentences, needles or words) and a sample's random stream. What it makes for
# a size holds about what it makes for a smaller one, so tokens grow with the size, and make_sample
# can look for the size that fills a length. A question is (text, answer prefix, references): the
# first is asked, and tiny/train.py trains on all, also with other hops, common words and repeats.

CATEGORIES = RandomWord()._categories
NOUNS, VERBS, ADJECTIVES = (
    sorted(word for word in set(CATEGORIES[kind]) if word.isalpha() and word.islower())
    for kind in ("noun", "verb", "adjective"))
WORDS = sorted({*NOUNS, *VERBS, *ADJECTIVES})

NEW_TOKENS = {"niah": 128, "vt": 30, "cwe": 120, "fwe": 50, "qa": 32}   # RULER's, by task family

FILLER = ("The river is wide.", "The road is long.", "The night is quiet.",
          "We walk on and come back.")
PROSE = ("The {a} {n} was ready to {v} with the {m}.",
         "Nobody could {v} the {n} before the {m} arrived.", "It takes one {a} {n} to {v} the {m}.",
         "When the {n} began to {v}, the {m} stayed {a}.",
         "They had to {v} every {n}, and even the {m} looked {a}.",
         "No {a} {n} will {v} near the {m}.", "She put the {n} beside the {m} and went to {v}.",
         "To {v} was easy once the {n} felt {a}.")


def filler(size, rng):
    return [FILLER[i % len(FILLER)] for i in range(size)]


def prose(size, rng):
    """Sentences of random words: prose without end, the same on every machine, without digits."""
    return [rng.choice(PROSE).format(a=rng.choice(ADJECTIVES), n=rng.choice(NOUNS),
                                     m=rng.choice(NOUNS), v=rng.choice(VERBS)) for _ in range(size)]


def number(rng, digits=7):
    return str(rng.randrange(10 ** (digits - 1), 10 ** digits))


def uuid(rng):
    return str(UUID(int=rng.getrandbits(128)))


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


def niah(size, rng, hay=prose, key=word_key, value=number, keys=1, values=1, queries=1):
    """Needles in a haystack. hay=None: nothing but needles, `size` of them."""
    hay_rng, key_rng, value_rng, place_rng = (Random(rng.random()) for _ in range(4))
    if hay is None:
        keys = size
    names = distinct(key, keys, key_rng)
    codes = distinct(value, keys * values, value_rng)
    codes = {name: codes[i * values:(i + 1) * values] for i, name in enumerate(names)}
    text = [f"The code of {name} is {code}." for name in names for code in codes[name]]
    rng.shuffle(text)
    if hay is not None:
        text = scatter(hay(size, hay_rng), text, place_rng)
    asked = rng.sample(names, len(names))
    questions = []
    for i in range(0, len(asked) - queries + 1, queries):
        references = [code for name in asked[i:i + queries] for code in codes[name]]
        what, verb = ("code", "is") if len(references) == 1 else ("codes", "are")
        what += " of " + " and ".join(", ".join(asked[i:i + queries]).rsplit(", ", 1))
        questions.append((f"What {verb} the {what}?", f" The {what} {verb}", references))
    return "Keep in mind the codes in this text.\n" + " ".join(text) + "\n", questions


def vt(size, rng, hops=4, avoid=()):
    """Variable tracking: a chain of assignments, each of the one before, spread through filler."""
    names = distinct(lambda r: "".join(r.choices(string.ascii_uppercase, k=5)),
                     hops + 1 + len(avoid), rng)
    names = [name for name in names if name not in avoid][:hops + 1]
    values = distinct(lambda r: number(r, 5), 1 + len(avoid), rng)
    value = next(value for value in values if value not in avoid)
    lines = [f"VAR {names[0]} = {value}."]
    lines += [f"VAR {name} = VAR {before}." for before, name in zip(names, names[1:])]
    text = scatter(filler(size, rng), lines, rng)
    return ("Follow the variables in this text.\n" + " ".join(text) + "\n",
            [(f"Which variables hold {value}?",
              f" The {hops + 1} variables that hold {value} are", names)])


def clash(word, others):
    """Whether one stands inside the other: it would be scored for it."""
    return any(word in other or other in word for other in others)


def cwe(size, rng, common=10, repeats=(30, 3), avoid=()):
    """Common words: a list where `common` words come repeats[0] times, `size` others repeats[1]."""
    pool = [word for word in rng.sample(WORDS, len(WORDS)) if word not in avoid]
    asked = []
    for word in pool:
        if len(asked) < common and not clash(word, [*asked, *avoid]):
            asked.append(word)
    rest = [word for word in pool if not clash(word, asked)][:size]
    if len(rest) < size:                                        # more than there are words: pairs
        pairs = [pair for pair in distinct(word_key, 2 * size, rng) if not clash(pair, asked)]
        rest += pairs[:size - len(rest)]
    words = asked * repeats[0] + rest * repeats[1]
    rng.shuffle(words)
    lines = "\n".join(f"{i} {word}" for i, word in enumerate(words, 1))
    return (f"Count the words in this list.\n{lines}\n",
            [(f"Which {common} words are the most common in the list?",
              f" The {common} most common words in the list are", sorted(asked, key=words.index))])


def fwe(size, rng, vocabulary=10):
    """Frequent words: `size` invented ones, k^-2 / zeta(2) of them the k-th; the first is dots."""
    coded = distinct(lambda r: "".join(r.choices(string.ascii_lowercase, k=6)), vocabulary, rng)
    counts = [int(size * 6 / math.pi ** 2 / k ** 2) for k in range(1, vocabulary + 1)]
    words = [word for word, n in zip(["...", *coded[1:]], counts) for _ in range(n)]
    rng.shuffle(words)
    return ("Count the words in this coded text. Ignore the dots.\n" + " ".join(words) + "\n",
            [("Which 3 words are the most frequent in the text?",
              " The 3 most frequent words in the text are", coded[1:4])])


NIAH = {"niah_single_1": dict(hay=filler), "niah_single_2": {}, "niah_single_3": dict(value=uuid),
        "niah_multikey_1": dict(keys=4), "niah_multikey_2": dict(hay=None),
        "niah_multikey_3": dict(hay=None, key=uuid, value=uuid),
        "niah_multivalue": dict(values=4), "niah_multiquery": dict(keys=4, queries=4)}
TASKS = (*NIAH, "vt", "cwe", "fwe")
RULERS = (*TASKS, "qa_1", "qa_2")                      # made elsewhere, from texts that are read
SMALLEST = {"niah": 2, "vt": 1, "cwe": 3, "fwe": 75}   # with fewer, the 4th and 5th words may tie


def family(task):
    return task.split("_")[0]


def build(task, size, rng, length, hops=4, common=10, repeats=None):
    """The context of a size for a task at a length, and its questions.

    From 2,048 tokens on, vt and cwe begin with a solved example; below 4,096 cwe repeats less.
    """
    if task in NIAH:
        return niah(size, rng, **NIAH[task])
    if task == "fwe":
        return fwe(size, rng, vocabulary=max(length // 50, 4))
    short, example, avoid = length < 4096, "", ()
    if length >= 2048:
        others, times = (10, (3, 1)) if short else (30, (10, 3))
        solved = vt(4, rng) if task == "vt" else cwe(others, rng, repeats=times)
        text, [(ask, prefix, answer)] = solved
        example = f"{text}{ask}{prefix} {' '.join(answer)}\n\n"
        avoid = {*text.split(), *ask.strip("?").split()}
    if task == "vt":
        context, questions = vt(size, rng, hops, avoid)
    else:
        repeats = repeats or ((6, 1) if short else (30, 3))
        context, questions = cwe(size, rng, common, repeats, avoid)
    return example + context, questions


# ---- samples of an asked length ------------------------------------------------------------------

def sized_sample(task, length, index, seed, tokenizer, size):
    """Sample `index` of a size: its prompt with the answer prefix, its ids, and its references."""
    rng = Random(f"{seed} {task} {length} {index}")
    context, [(ask, prefix, references), *_] = build(task, size, rng, length)
    prompt = context + ask + prefix
    return {"prompt": prompt, "ids": gdn.tokenize(tokenizer, prompt), "references": references}


def make_sample(task, length, index, seed, tokenizer):
    """Sample `index` of a task: the largest whose prompt and answer fit into the length.

    A pure function of its arguments. Beyond the smallest sample the tokens are nearly proportional
    to the size, so each guess is the one before, scaled to the room there is; the search ends
    between a size that fits and the next, which does not.
    """
    room = length - NEW_TOKENS[family(task)]
    smallest = low = SMALLEST[family(task)]
    best = sized_sample(task, length, index, seed, tokenizer, smallest)
    least = len(best["ids"])
    high, guess = math.inf, smallest * room // least            # too few: the question comes once
    while high - low > 1:
        guess = max(low + 1, min(guess, high - 1))
        sample = sized_sample(task, length, index, seed, tokenizer, guess)
        tokens = len(sample["ids"])
        if tokens <= room:
            low, best = guess, sample
        else:
            high = guess
        guess = smallest + (guess - smallest) * (room - least) // max(tokens - least, 1)
    return best


# ---- prompts of RULER's own files ----------------------------------------------------------------

def read_data(data, tasks, lengths, count):
    """RULER's own prompts: {(task, length): (the first `count` samples, their file's SHA-256)}.

    data: a folder with RULER's tree, .../<length>/data/<task>/validation.jsonl, or a file of it.
    Without tasks or lengths, all that are there.
    """
    path, found = Path(os.path.abspath(os.path.expanduser(data))), {}
    files = [path] if path.is_file() else sorted(path.glob("**/validation.jsonl"))
    for file in files:
        place = re.search(r"/(\d+)/data/([^/]+)/[^/]+$", file.as_posix())
        if not place:
            raise gdn.Error(f"{file} says neither its length nor its task: put it where RULER does,"
                            " in <length>/data/<task>/validation.jsonl")
        length, task = int(place[1]), place[2]
        if tasks and task not in tasks or lengths and length not in lengths:
            continue
        if task not in RULERS:
            raise gdn.Error(f"{file} is for {task}, which is no task of {', '.join(RULERS)}: name "
                            "the tasks to run with --tasks")
        if (task, length) in found:
            raise gdn.Error(f"{file} is a second file for {task} at {length} in --data {data}: "
                            "give one of them")
        sha = hashlib.sha256(file.read_bytes()).hexdigest()
        found[task, length] = read_upstream(file)[:count], sha
    missing = {*tasks, *lengths} - {name for key in found for name in key}
    if missing or not found:
        there = files or (path.is_dir() and sorted(path.iterdir())) or ["nothing"]
        names = ", ".join(sorted(map(str, missing))) or "any task"
        raise gdn.Error(f"--data {data} has no <length>/data/<task>/validation.jsonl for {names}: "
                        f"there is {', '.join(map(str, there[:9]))}")
    return found


def read_upstream(path):
    """The samples of a file that RULER's own generator wrote, its prompts as they are."""
    samples = []
    for line_number, line in enumerate(gdn.read_text(path).split("\n"), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            prompt = row["input"] + row.get("answer_prefix", "")        # none before 2025
            texts = [prompt, *row["outputs"]]
            whole = len(texts) > 1 and all(isinstance(text, str) and text for text in texts)
            if not (whole and isinstance(row["outputs"], list)):
                raise TypeError("its input or outputs are not RULER's")
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise gdn.Error(f"{path}, line {line_number}: no RULER sample with input and outputs "
                            f"({type(error).__name__}: {error})") from None
        prompt = prompt.encode(errors="replace").decode()               # no lone surrogates
        samples.append({"prompt": prompt, "references": row["outputs"]})
    if not samples:
        raise gdn.Error(f"{path} holds no sample")
    return samples


# ---- generation and score ------------------------------------------------------------------------

@torch.inference_mode()
def generate(run, ids, ranks, segment, cut, new_tokens, stop):
    """Greedy answers to one prompt, ids [1, T], by the untouched model and a row per rank.

    Lists of tokens. Boundaries are counted from the first token of the prompt and go on through the
    answer. An answer ends before the first of the tokens in stop, a set.
    """
    cache, gram, feed = DynamicCache(config=run.net.config), 0.0, ids
    rows, end = 1 + len(ranks), ids.shape[1] + new_tokens - 1   # the last token is not read again
    answers = [[] for _ in range(rows)]
    with gdn.recorded_rule(run.net) as calls:
        while len(answers[0]) < new_tokens and not all(stop & set(answer) for answer in answers):
            for start, hidden, boundary in gdn.segments(run.net, feed, segment, cache, end):
                position = start + hidden.shape[1]
                if boundary:
                    with gdn.at_boundary(run):
                        gram = gdn.truncate_rows(cache, ranks, cut, int(ids.sum()) + position,
                                                 calls, gram)
                run.bar.update(hidden.shape[1])
            logits = run.net.get_output_embeddings()(hidden[:, -1])             # [B, W]
            if not torch.isfinite(logits).all():
                raise gdn.Error(f"the model's logits after token {position} are NaN or infinite: "
                                "it has overflowed (in half precision, try --dtype float32)")
            feed = logits.argmax(-1, keepdim=True).expand(rows, -1)             # [1 + R, 1]
            for answer, token in zip(answers, feed[:, 0].tolist()):
                answer.append(token)
    return [list(takewhile(lambda token: token not in stop, answer)) for answer in answers]


def score(task, output, references):
    """RULER's recall in points: the share of references in the output, whatever their case.

    For qa, where the references are wordings of one answer, whether any of them does.
    """
    found = [reference.lower() in output.lower() for reference in references]
    return 100.0 * (any(found) if family(task) == "qa" else sum(found) / len(found))


def measure(run, task, sample, groups, segment, cut):
    """References, outputs and scores of one sample."""
    ids = sample.get("ids") or gdn.tokenize(run.tokenizer, sample["prompt"])
    if len(ids) <= segment:
        raise gdn.Error(f"a prompt of {task} has {len(ids)} tokens, and so crosses no boundary of "
                        f"--segment {segment}: nothing would be truncated")
    ids = torch.tensor([ids])                                   # [1, T]
    stop = run.net.generation_config.eos_token_id
    stop = {run.tokenizer.eos_token_id, *(stop if isinstance(stop, list) else [stop])}
    names, answers = ["full"], []
    for ranks in groups:
        rows = generate(run, ids, ranks, segment, cut, NEW_TOKENS[family(task)], stop)
        names += map(str, ranks)
        answers += rows[1:] if answers else rows
    outputs = dict(zip(names, run.tokenizer.batch_decode(answers, skip_special_tokens=True)))
    scores = {name: score(task, text, sample["references"]) for name, text in outputs.items()}
    return {"references": sample["references"], "outputs": outputs, "scores": scores}


# ---- the run -------------------------------------------------------------------------------------

DEFAULT_TASKS = ("niah_single_1", "niah_multikey_2", "vt", "cwe", "fwe")
RANKS = (32, 12, 6, 3, 1, 0)


def main(*, model: str = "tiny/hybrid", tasks: gdn.names = DEFAULT_TASKS,
         lengths: gdn.counts = (), samples: gdn.count = 25, ranks: gdn.counts = RANKS,
         seed: gdn.count0 = 0, data: str = None, segment: gdn.count = 256,
         keep: gdn.Keep = "top", heads: gdn.heads = "all", store: gdn.Store = "float32",
         rows: gdn.count = None, device: str = "auto", dtype: gdn.DType = "auto",
         results: str = "results"):
    """Score RULER-style tasks with the states truncated at every boundary of prompt and answer.

    Args:
        tasks: RULER's names, or all: niah_single_1, _2, _3, niah_multikey_1, _2, _3,
            niah_multivalue, niah_multiquery, vt, cwe, fwe; with --data also qa_1 and qa_2. By
            default niah_single_1, niah_multikey_2, vt, cwe and fwe; with --data what is there.
        lengths: tokens of prompt and answer together, 1024 by default; with --data what is there.
        samples: how many prompts of each task and length.
        seed: of the samples.
        data: prompts of RULER's own generator instead: a folder with its tree,
            length/data/task/validation.jsonl, or a file of it.
    """
    arguments = dict(locals())
    if data is None:
        tasks = TASKS if tasks == ("all",) else tasks
        for task in tasks:
            if task not in TASKS:
                raise gdn.Error(f"--tasks knows {', '.join(TASKS)}, not {task}")
    elif tasks in (DEFAULT_TASKS, ("all",)):
        tasks = ()                                              # all that are there
    run = gdn.open_model(model, device, dtype, results)
    if data is None:
        words = hashlib.sha256(" ".join(WORDS).encode()).hexdigest()    # wonderwords' may change
        given = {(task, length): (None, words) for task in tasks for length in lengths or (1024,)}
    else:
        given = read_data(data, tasks, lengths, samples)
    ranks = gdn.check_ranks(run, ranks, RANKS, store)
    cut = gdn.Cut(keep, store, gdn.chosen_heads(run, heads))
    rows = rows or len(ranks)
    groups = [ranks[i:i + rows] for i in range(0, len(ranks), rows)]
    files = []
    for (task, length), (prompts, sha) in given.items():
        if not prompts:
            check_length(task, length, samples, seed, segment, run.tokenizer)
        count = len(prompts) if prompts else samples
        made = {**arguments, "task": task, "length": length, "samples": count, "ranks": ranks,
                "seed": None if prompts else seed}
        path, record = gdn.open_results(run, f"04_ruler/{task}_{length}", made, cut=cut, data=sha)
        files.append((path, record, prompts, range(len(record["items"]), count)))
    tokens = sum(len(left) * record["depends"]["length"] for _, record, _, left in files)
    gdn.start(run, path.parent, sum(len(left) for *_, left in files), tokens * len(groups))
    done = 0
    for path, record, prompts, left in files:
        task, length = record["depends"]["task"], record["depends"]["length"]
        run.bar.set_description(f"{task} {length}")
        for index in left:
            if prompts:
                sample = prompts[index]
            else:
                sample = make_sample(task, length, index, seed, run.tokenizer)
            gdn.add_item(run, path, record, measure(run, task, sample, groups, segment, cut))
            done += length * len(groups)
            run.bar.update(done - run.bar.n)                    # an answer may have ended early
    run.bar.close()
    print_table([record for _, record, *_ in files])
    print(path.parent)


def check_length(task, length, samples, seed, segment, tokenizer):
    """Raise Error where a length is too short for the smallest samples, or for a boundary."""
    budget, needed = NEW_TOKENS[family(task)], 0
    for index in range(samples):
        sample = sized_sample(task, length, index, seed, tokenizer, SMALLEST[family(task)])
        needed = max(needed, len(sample["ids"]) + budget)
    if needed > length:
        raise gdn.Error(f"--lengths {length} is too short for {task}: the smallest prompts and "
                        f"their answers take up to {needed} tokens")
    if length - budget <= segment:
        raise gdn.Error(f"--lengths {length} leaves {task} no prompt beyond the first boundary of "
                        f"--segment {segment}: nothing would be truncated")


def print_table(records):
    print(f"{records[0]['model']}\n{'task':<16} {'length':>7} {'samples':>7} {'full':>6}   change "
          "in points at rank, ± standard error")
    for record in records:
        scores = {rank: [item["scores"][rank] for item in record["items"]]
                  for rank in ("full", *record["bytes"])}
        full, _ = gdn.mean_se(scores["full"])
        cells = []
        for rank in record["bytes"]:
            changes = [cut - whole for cut, whole in zip(scores[rank], scores["full"])]
            cells.append(f"{rank}: {gdn.with_error(changes)}")
        print(f"{record['depends']['task']:<16} {record['depends']['length']:>7} "
              f"{len(record['items']):>7} {full:6.1f}   {'   '.join(cells)}")


if __name__ == "__main__":
    gdn.command(main)

"""Tasks in the style of RULER with every GDN state cut back to its top r modes at each boundary.

    python 04_ruler.py                                                # the bundled models
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
import string
import sys
from pathlib import Path
from random import Random

import torch
from tqdm import tqdm
from transformers import DynamicCache
from wonderwords import RandomWord

import gdn

# ---- the tasks: each makes a context and the questions that can be asked about it ---------------
#
# A task takes a size (sentences, needles or words) and a sample's random stream. What it makes for
# a size holds about what it makes for a smaller one, so tokens grow with the size, and make_sample
# can look for the size that fills a length. A question is (text, answer prefix, references).

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
    h = f"{rng.getrandbits(128):032x}"
    return "-".join((h[:8], h[8:12], h[12:16], h[16:20], h[20:]))


def word_key(rng):
    return f"{rng.choice(ADJECTIVES)}-{rng.choice(NOUNS)}"


def letters(rng, alphabet, n):
    return "".join(rng.choices(alphabet, k=n))


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


def join_and(words):
    return words[0] if len(words) == 1 else ", ".join(words[:-1]) + " and " + words[-1]


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
        references = [code for name in asked[i:i + queries] for code in codes[name]]
        what, verb = ("code", "is") if len(references) == 1 else ("codes", "are")
        questions.append((f"What {verb} the {what} of {who}?", f" The {what} of {who} {verb}",
                          references))
    return "Keep in mind the codes in this text.\n" + " ".join(text) + "\n", questions


def vt(size, rng, hops=4, avoid=()):
    """Variable tracking: a chain of assignments, each of the one before, spread through filler."""
    names = distinct(lambda r: letters(r, string.ascii_uppercase, 5), hops + 1 + len(avoid), rng)
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
    coded = distinct(lambda r: letters(r, string.ascii_lowercase, 6), vocabulary, rng)
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
        if task == "vt":
            text, [(ask, prefix, answer)] = vt(4, rng)
        elif short:
            text, [(ask, prefix, answer)] = cwe(10, rng, repeats=(3, 1))
        else:
            text, [(ask, prefix, answer)] = cwe(30, rng, repeats=(10, 3))
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
    ids = tokenizer(context + ask + prefix, verbose=False).input_ids
    return {"prompt": context + ask + prefix, "ids": ids, "references": references}


def make_sample(task, length, index, seed, tokenizer):
    """Sample `index` of a task: the largest whose prompt and answer fit into the length.

    A pure function of its arguments. The tokens are almost linear in the size: a few guesses, each
    on the line through the two sizes before, end between one that fits and the next, which doesn't.
    """
    room = length - NEW_TOKENS[family(task)]
    low = SMALLEST[family(task)]
    best = sized_sample(task, length, index, seed, tokenizer, low)
    low_tokens, high, slope = len(best["ids"]), math.inf, len(best["ids"]) / low
    while high - low > 1:
        guess = int(low + (room - low_tokens) / slope)
        if guess > 12 * low:                                    # far: a cheap look at an eighth
            guess //= 8
        guess = max(low + 1, min(guess, high - 1))
        sample = sized_sample(task, length, index, seed, tokenizer, guess)
        tokens = len(sample["ids"])
        if guess - low > 8:                                     # fewer say little of the slope
            slope = (tokens - low_tokens) / (guess - low)
        if tokens <= room:
            low, low_tokens, best = guess, tokens, sample
        else:
            high = guess
    return best


def read_upstream(path, count):
    """The first samples of a file that RULER's own generator wrote, its prompts as they are."""
    samples = []
    for line_number, line in enumerate(gdn.read_text(path).split("\n"), 1):
        if not line.strip() or len(samples) == count:
            continue
        try:
            row = json.loads(line)
            prompt = row["input"] + row.get("answer_prefix", "")        # none before 2025
            references, length = row["outputs"], row.get("length", 0)
            texts = [prompt, *references] if isinstance(references, list) else []
            texts = [text for text in texts if isinstance(text, str) and text]
            if len(texts) < 2 or len(texts) != 1 + len(references) or not isinstance(length, int):
                raise TypeError("its input, outputs or length are not RULER's")
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise gdn.Error(f"{path}, line {line_number}: no RULER sample with input and outputs "
                            f"({type(error).__name__}: {error})") from None
        prompt = prompt.encode(errors="replace").decode()               # no lone surrogates
        samples.append({"prompt": prompt, "references": references, "length": length})
    if not samples:
        raise gdn.Error(f"{path} holds no sample")
    return samples


def read_data(data, tasks, lengths, count):
    """RULER's own files that --tasks and --lengths ask for: {(task, length or None): found}.

    What is found of a file are its samples and its SHA-256.

    data: one .jsonl, or a folder with .../<task>/validation.jsonl; in RULER's own tree, which is
    <length>/data/<task>/validation.jsonl, the length is the folder's.
    """
    path, known = Path(os.path.expanduser(data)), (*TASKS, "qa_1", "qa_2")
    files = [path] if os.path.isfile(path) else sorted(path.glob("**/validation.jsonl"))
    if not files:
        raise gdn.Error(f"--data {data}: no such file, and no folder with task/validation.jsonl")
    found = {}
    for file in files:
        *_, above, parent, task, _ = ("", "", "", *file.resolve().parts)
        length = int(above) if parent == "data" and above.isdecimal() else None
        if file == path and len(tasks) == 1:
            task = tasks[0]
        asked = tasks == DEFAULT_TASKS or task in tasks
        if not asked or (length and lengths and length not in lengths):
            continue
        if task not in known or (task, length) in found:
            raise gdn.Error(f"{file} is for the task {task}: name a file's task with --tasks, one "
                            f"of {', '.join(known)}, and each task once")
        sha = hashlib.sha256(file.read_bytes()).hexdigest()
        found[task, length] = read_upstream(file, count), sha
    if not found:
        raise gdn.Error(f"--data {data} has none of --tasks {','.join(tasks)} at these --lengths")
    return found


def label(task, length, samples, lengths, tokenizer):
    """The length that a file's results are filed under; Error where its prompts belie it."""
    if length is None:
        if len(lengths) > 1:
            raise gdn.Error("--lengths names the one length that the files of --data were made for")
        length = lengths[0] if lengths else max(sample["length"] for sample in samples)
    prompt = max((sample["prompt"] for sample in samples), key=len)
    tokens = len(tokenizer(prompt, verbose=False).input_ids)
    least = max(tokens, *(sample["length"] for sample in samples))
    if not least <= length <= 2 * tokens:
        raise gdn.Error(f"the prompts of {task} in --data have up to {tokens} tokens and say "
                        f"length {least}: they were not made for {length}; name it with --lengths")
    return length


# ---- generation and score ------------------------------------------------------------------------

@torch.inference_mode()
def generate(net, run, ids, group, new_tokens, seconds, bar):
    """Greedy answers to one prompt, ids [1, T], a row per rank (None: untouched): lists of tokens.

    Boundaries are counted from the first token of the prompt and go on through the answer. A row
    ends at the end-of-text token, which is left out.
    """
    cache, position, feed = DynamicCache(config=net.config), 0, ids
    end = ids.shape[1] + new_tokens - 1                         # the last token is not read again
    answers, open_rows = [[] for _ in group], set(range(len(group)))
    while True:
        for start, hidden, boundary in gdn.segments(net, feed, run.segment, cache, position, end):
            position = start + hidden.shape[1]
            if boundary:
                with gdn.stopwatch(seconds, "truncate"):
                    gdn.truncate_rows(cache, run.layers, group, run.keep, int(ids.sum()) + position,
                                      run.mask)
            bar.update(hidden.shape[1])
        logits = net.get_output_embeddings()(hidden[:, -1])     # [B, W]
        if not torch.isfinite(logits).all():
            raise gdn.Error(f"the model's logits after token {position} are NaN or infinite: it "
                            "has overflowed (try --dtype float32)")
        feed = logits.argmax(-1, keepdim=True).expand(len(group), -1)       # [R, 1]
        for row, token in enumerate(feed[:, 0].tolist()):
            if token in run.stop:
                open_rows.discard(row)
            elif row in open_rows:
                answers[row].append(token)
        if not open_rows or position - ids.shape[1] + 1 == new_tokens:
            return answers


def score(task, output, references):
    """RULER's recall in points: the share of references in the output, whatever their case.

    For qa, where the references are wordings of one answer, whether any of them does.
    """
    found = [reference.lower() in output.lower() for reference in references]
    return 100.0 * (any(found) if family(task) == "qa" else sum(found) / len(found))


# ---- the run -------------------------------------------------------------------------------------

DEFAULT_TASKS = ("niah_single_1", "niah_multikey_2", "vt", "cwe", "fwe")
RANKS = (32, 12, 6, 3, 1, 0)


def main(*, model: gdn.MODELS = gdn.BUNDLED, tasks: gdn.NAMES = DEFAULT_TASKS,
         lengths: gdn.NUMBERS = (), samples: gdn.NUMBER = 25, ranks: gdn.NUMBERS = RANKS,
         seed: gdn.NUMBER_0 = 0, data: gdn.TEXT = None, segment: gdn.NUMBER = 256,
         keep: gdn.MODES = "top", heads: gdn.HEADS = "all", rows: gdn.NUMBER = None,
         device: gdn.TEXT = "auto", dtype: gdn.DTYPE = "auto", results: gdn.TEXT = "results"):
    """Score RULER-style tasks with the states truncated at every boundary of prompt and answer.

    Args:
        model: folders, hub ids, tiny/hybrid or tiny/recurrent, with commas; tiny is the last two.
        tasks: RULER's names, or all: niah_single_1, _2, _3, niah_multikey_1, _2, _3,
            niah_multivalue, niah_multiquery, vt, cwe, fwe; with --data also qa_1 and qa_2. By
            default niah_single_1, niah_multikey_2, vt, cwe and fwe; with --data what is there.
        lengths: tokens of prompt and answer together, 1024 by default; with --data the lengths to
            run of RULER's tree, or the one that other files were made for.
        samples: how many prompts of each task and length.
        ranks: modes to keep; 0 wipes the state (32,12,6,3,1,0).
        seed: of the samples.
        data: a .jsonl of RULER's own generator, or a folder of task/validation.jsonl or
            length/data/task/validation.jsonl, instead of prompts made here.
        segment: tokens between boundaries.
        keep: which modes: top, or as a control bottom or random.
        heads: all, or those with a decay horizon over-N or upto-N tokens; 02 must have run.
        rows: at most so many ranks side by side, if memory is short; all of them by default.
        device: auto, cpu, cuda, cuda:1, ..., or map for a model larger than one device.
        dtype: auto (the checkpoint's own), float32, bfloat16 or float16.
        results: the folder to write to.
    """
    arguments = dict(locals())
    if data is None:
        tasks = TASKS if tasks == ("all",) else tasks
        for task in tasks:
            if task not in TASKS:
                raise gdn.Error(f"--tasks knows {', '.join(TASKS)}, not {task}")
        given = {(task, length): (None, None) for task in tasks for length in lengths or (1024,)}
    else:
        given = read_data(data, DEFAULT_TASKS if tasks == ("all",) else tasks, lengths, samples)
    runs = gdn.plan("04_ruler", arguments)
    for run in runs:
        run.segment, run.keep, run.mask = segment, keep, gdn.chosen_heads(run, heads)
        run.ranks, run.files = gdn.check_ranks(run, ranks, RANKS), []
        for (task, length), (rows_of_file, sha) in given.items():
            if rows_of_file:
                length = label(task, length, rows_of_file, lengths, run.tokenizer)
            else:
                check_length(task, length, samples, seed, run)
            gdn.warn_of_length(run, length)
            path = gdn.result_path(run, f"04_ruler/{task}_{length}", arguments)
            record = gdn.open_results(
                run, path, {**arguments, "task": task, "length": length, "ranks": run.ranks,
                            "data_sha256": sha}, heads_cut=[int(run.mask.sum()), run.mask.numel()])
            run.files.append((path, record, rows_of_file))
    for run in runs:
        run_model(run, gdn.row_groups(run.ranks, rows), samples, seed)
        print_table(run)


def check_length(task, length, samples, seed, run):
    """Raise Error where a length is too short for the smallest sample, or for a boundary."""
    budget, works, needed = NEW_TOKENS[family(task)], length - 1, length
    while works < needed:                                       # other lengths have other samples
        works = needed
        for index in range(samples):
            sample = sized_sample(task, works, index, seed, run.tokenizer, SMALLEST[family(task)])
            needed = max(needed, len(sample["ids"]) + budget)
    if works > length:
        raise gdn.Error(f"--lengths {length} is too short for {task}: {works} works")
    if length - budget <= run.segment:
        raise gdn.Error(f"--lengths {length} leaves {task} no prompt beyond the first boundary of "
                        f"--segment {run.segment}: nothing would be truncated")


def run_model(run, groups, samples, seed):
    """Measure what is missing in a model's result files, sample by sample."""
    unfinished = []
    for path, record, given in run.files:
        left = range(len(record["items"]), len(given) if given else samples)
        if left:
            unfinished.append((path, record, given, left))
    if not unfinished:
        print(f"{run.output}/04_ruler is complete", file=sys.stderr)
        return
    net = gdn.load_model(run)
    stop = net.generation_config.eos_token_id
    run.stop = {run.tokenizer.eos_token_id, *(stop if isinstance(stop, list) else [stop])}
    for path, record, given, left in unfinished:
        task, length = record["arguments"]["task"], record["arguments"]["length"]
        with tqdm(total=len(left) * length * len(groups), desc=f"{task} {length}", unit="token",
                  unit_scale=True) as bar:
            for done, index in enumerate(left, 1):
                item = {"seconds": {"total": 0.0, "truncate": 0.0}}
                with gdn.stopwatch(item["seconds"], "total"):
                    sample = given[index] if given else make_sample(task, length, index, seed,
                                                                    run.tokenizer)
                    item.update(measure(net, run, task, sample, groups, item["seconds"], bar))
                gdn.add_item(path, record, item)
                bar.update(done * length * len(groups) - bar.n)


def measure(net, run, task, sample, groups, seconds, bar):
    """References, outputs and scores of one sample."""
    ids = sample.get("ids") or run.tokenizer(sample["prompt"], verbose=False).input_ids
    ids = torch.tensor([ids])                                   # [1, T]
    if ids.shape[1] <= run.segment:
        raise gdn.Error(f"a prompt of {task} has {ids.shape[1]} tokens, and so crosses no boundary "
                        f"of --segment {run.segment}: nothing would be truncated")
    names, answers = ["full"], []
    for group in groups:
        rows = generate(net, run, ids.to(gdn.resolve(run.device)), group, NEW_TOKENS[family(task)],
                        seconds, bar)
        names += [str(rank) for rank in group[1:]]
        answers += rows[1:] if answers else rows
    texts = run.tokenizer.batch_decode(answers, skip_special_tokens=True)
    outputs = dict(zip(names, texts))
    scores = {name: score(task, text, sample["references"]) for name, text in outputs.items()}
    return {"references": sample["references"], "outputs": outputs, "scores": scores}


def print_table(run):
    print(f"{run.model}\n{'task':<16} {'length':>7} {'samples':>7} {'full':>6}   change in points "
          "at rank, ± standard error")
    for path, record, _ in run.files:
        scores = {rank: [item["scores"][rank] for item in record["items"]]
                  for rank in record["items"][0]["scores"]}
        full, _ = gdn.mean_se(scores["full"])
        cells = []
        for rank in map(str, run.ranks):
            changes = [cut - whole for cut, whole in zip(scores[rank], scores["full"])]
            cells.append(f"{rank}: {gdn.with_error(changes)}")
        print(f"{record['arguments']['task']:<16} {record['arguments']['length']:>7} "
              f"{len(record['items']):>7} {full:6.1f}   {'   '.join(cells)}")
    print(f"{path.parent}\n")


if __name__ == "__main__":
    gdn.command(main)

"""Tests of the trainer, on narrower models and a little text.

    python -m pytest -q tiny/test_train.py
"""
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from random import Random

import pytest
import torch
from safetensors.torch import load_file
from torch.optim.optimizer import register_optimizer_step_pre_hook
from transformers import AutoTokenizer

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
import train                                                        # finds gdn and 04_ruler.py
from train import gdn, ruler

TOKENIZER = AutoTokenizer.from_pretrained(HERE / "hybrid")
END = TOKENIZER.eos_token_id
FILES = gdn.stdlib_files(held_out=False)[:3]


def three_files(held_out):
    assert not held_out, "the held-out files are for evaluation"
    return FILES


@pytest.fixture
def tiny(tmp_path, monkeypatch):
    """A folder like tiny/, with models of two narrow layers, for short steps."""
    narrow = {"hidden_size": 32, "intermediate_size": 32, "head_dim": 8, "linear_key_head_dim": 8,
              "linear_value_head_dim": 8, "num_hidden_layers": 2}
    for name in train.STEPS:
        (tmp_path / name).mkdir()
        for file in (HERE / name).glob("tokenizer*"):
            shutil.copy(file, tmp_path / name)
        config = json.loads((HERE / name / "config.json").read_text()) | narrow
        config["layer_types"] = config["layer_types"][::3]          # the first and the last
        (tmp_path / name / "config.json").write_text(json.dumps(config))
    for name, value in dict(HERE=tmp_path, TASK_TOKENS=512, TEXT_TOKENS=256, EVERY=2).items():
        monkeypatch.setattr(train, name, value)
    monkeypatch.setattr(gdn, "stdlib_files", three_files)
    threads = torch.get_num_threads()
    yield tmp_path
    torch.set_num_threads(threads)
    torch.set_flush_denormal(False)


def read_log(folder):
    lines = [json.loads(line) for line in (folder / "train.jsonl").read_text().splitlines()]
    for line in lines:
        assert line.pop("minutes") >= 0
    return lines


# ---- data ---------------------------------------------------------------------------------------

@pytest.mark.parametrize("task", train.SHARE)
def test_a_sequence_is_what_04_builds_followed_by_its_own_answers(task, monkeypatch):
    build, built = ruler.build, []

    def build_and_keep(*args, **options):
        built.append(build(*args, **options))
        return built[-1]

    monkeypatch.setattr(ruler, "build", build_and_keep)
    reordered = asked = 0
    for length in (256, 512, 1024):
        built.clear()
        tokens, marks, right = zip(*train.task_sequence(task, length, Random(length), TOKENIZER))
        for context, [(question, prefix, references), *_] in built[:-1]:    # was cut: did not fit
            first = context + question + prefix + "".join(" " + word for word in references)
            assert len(TOKENIZER(first).input_ids) + 1 > length
        context, questions = built[-1]
        assert 0.5 * length < len(tokens) <= length and tokens[-1] == END
        text, mark = context, 2
        for question, prefix, references in questions[:tokens.count(END)]:
            text += question + prefix
            asked += 1
            words = []
            for _ in references:
                words.append(TOKENIZER.decode([t for t, m in zip(tokens, marks) if m == mark]))
                mark += 1
            text += "".join(words)
            answer = [word.removesuffix("<|endoftext|>").strip() for word in words]
            assert sorted(answer) == sorted(references)
            assert task in train.ANY_ORDER or answer == references
            reordered += answer != references
        assert TOKENIZER.decode(tokens) == text and max(marks) == mark - 1
        assert TOKENIZER.decode([t for t, m in zip(tokens, marks) if m == 0]) == context
        for token, choices in zip(tokens, right):
            assert token in choices and (len(choices) == 1 or task in train.ANY_ORDER)
    assert (reordered > 0) == (task in train.ANY_ORDER)             # taught in no order at all
    assert (asked > 3) == (task in ("niah_multikey_1", "niah_multikey_2"))


def test_any_of_the_common_words_still_to_come_is_right_and_none_that_was_written():
    tokens, marks, right = zip(*train.task_sequence("cwe", 512, Random(0), TOKENIZER))
    answer = [i for i, mark in enumerate(marks) if mark >= 2]
    words = TOKENIZER.decode([tokens[i] for i in answer]).removesuffix("<|endoftext|>").split()
    words = [TOKENIZER(" " + word).input_ids for word in words]
    assert len(words) == 10 and max(map(len, words)) > 1
    for n, word in enumerate(words):
        start = marks.index(n + 2)
        assert right[start] == {other[0] for other in words[n:]}
        for i in range(1, len(word)):
            follow = {other[i] for other in words[n:] if other[:i] == word[:i] and other[i:]}
            assert right[start + i] == follow
    assert right[-1] == {END}


def test_a_batch_holds_its_sequences_and_predicts_neither_the_first_token_nor_the_padding():
    tasks = ["vt", "cwe", "niah_multikey_2"]
    ids, marks, right = train.task_batch(tasks, 256, Random(3), TOKENIZER)
    rng = Random(3)
    for row, task in enumerate(tasks):
        tokens, expected, choices = zip(*train.task_sequence(task, 256, rng, TOKENIZER))
        padding = 256 - len(tokens)
        assert padding > 0
        assert ids[row].tolist() == [*tokens] + [0] * padding
        assert marks[row].tolist() == [-1, *expected[1:]] + [-1] * padding
        for some, here in zip(choices, right[row].tolist()):
            assert sorted(here) == [-1] * (10 - len(some)) + sorted(some)


# ---- the curriculum -----------------------------------------------------------------------------

def test_a_tasks_sequences_are_neither_too_short_for_it_nor_longer_than_it_has_grown_to():
    skill, lengths = dict.fromkeys(train.SHARE, 0.0), dict(train.SHORTEST)
    lengths["vt"] = 384
    seen = {"hybrid": set(), "recurrent": set()}
    for name in seen:
        for seed in range(300):
            length, tasks = train.choose(name, False, Random(seed), skill, lengths)
            seen[name].add(length)
            assert len(tasks) == train.TASK_TOKENS // length
            assert all(train.SHORTEST[task] <= length <= lengths[task] for task in tasks)
    assert seen["hybrid"] == {128, 192, 256, 384}
    assert seen["recurrent"] == {128}                               # as long as its needles are
    for seed in range(300):
        length, tasks = train.choose("recurrent", True, Random(seed), skill, lengths)
        seen["recurrent"].add(length)
        assert all(train.SHORTEST[task] <= length for task in tasks)
    assert seen["recurrent"] == {128, 192, 256, 384, 512, 1024}


def test_a_task_comes_as_often_as_its_share_and_what_is_still_wrong_of_it():
    skill = {task: i / 10 for i, task in enumerate(train.SHARE)}
    counts, total = dict.fromkeys(train.SHARE, 0), 0
    for seed in range(3000):
        length, tasks = train.choose("hybrid", True, Random(seed), skill, train.SHORTEST)
        if length >= 256:                                           # where every task fits
            total += len(tasks)
            for task in tasks:
                counts[task] += 1
    need = {task: share * (1.1 - skill[task]) for task, share in train.SHARE.items()}
    for task in counts:
        expected = need[task] / sum(need.values())
        assert abs(counts[task] / total - expected) < 5 * (expected / total) ** 0.5


def test_a_task_grows_when_enough_references_are_right_at_its_length_and_is_measured_anew():
    marks = torch.full((2, 128), -1)
    marks[:, :9] = torch.tensor([0, 1, 2, 2, 3, 3, 3, 4, 5])        # four references
    wrong = torch.zeros_like(marks, dtype=torch.bool)
    wrong[0, 5:8] = True                                            # tokens of the second and third
    skill, lengths = dict.fromkeys(train.SHARE, 0.1), dict(train.SHORTEST)
    train.assess("hybrid", False, ["vt", "fwe"], marks, wrong, skill, lengths)
    assert skill["vt"] == pytest.approx(0.1 + 0.05 * (0.5 - 0.1))
    assert skill["fwe"] == 0.1 and lengths == train.SHORTEST        # fwe is at 192, not at 128
    for name, before in (("hybrid", 0.795), ("recurrent", 0.69)):
        skill["vt"] = before - 0.01
        train.assess(name, False, ["vt"], marks[1:], wrong[1:], skill, lengths)
        assert lengths["vt"] == 128 and skill["vt"] < train.ENOUGH[name]
        skill["vt"] = before
        train.assess(name, True, ["vt"], marks[1:], wrong[1:], skill, lengths)
        assert lengths["vt"] == 128 and skill["vt"] == pytest.approx(before + 0.05 * (1 - before))
        skill["vt"] = before
        train.assess(name, False, ["vt"], marks[1:], wrong[1:], skill, lengths)
        assert lengths["vt"] == 192 and skill["vt"] == 0.5
        lengths["vt"] = 128
    skill["vt"], lengths["vt"] = 0.99, 512
    train.assess("hybrid", False, ["vt"], marks, wrong, skill, lengths)
    assert lengths["vt"] == 512                                     # there is no next length


# ---- model and losses ---------------------------------------------------------------------------

@pytest.mark.parametrize("end, rate, dt", [(0, 0.1, 0.001), (1, 8, 0.1)])
def test_decays_start_between_the_ends_that_the_card_names(tiny, monkeypatch, end, rate, dt):
    monkeypatch.setattr(torch.Tensor, "uniform_", lambda x, *ends, **_: x.fill_(ends[end]))
    layer = train.make_model("hybrid").model.layers[0].linear_attn
    assert layer.A_log.exp().tolist() == pytest.approx([rate] * 4)
    assert torch.nn.functional.softplus(layer.dt_bias).tolist() == pytest.approx([dt] * 4)


def test_every_parameter_has_one_optimizer_and_the_gates_the_lowest_rate(tiny):
    model = train.make_model("hybrid")
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    peaks = {}
    for optimizer in train.make_optimizers(model):
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                assert peaks.setdefault(names[id(parameter)], group["peak"]) == group["peak"]
    assert peaks.keys() == set(names.values())
    gdn_layer, attention = "model.layers.0.linear_attn.", "model.layers.1.self_attn."
    for name, peak in {
            "model.embed_tokens.weight": 3e-3, "model.norm.weight": 3e-3,
            gdn_layer + "A_log": 3e-4, gdn_layer + "dt_bias": 3e-4,
            gdn_layer + "in_proj_a.weight": 3e-4, gdn_layer + "in_proj_b.weight": 3e-3,
            gdn_layer + "conv1d.weight": 3e-3, gdn_layer + "in_proj_qkv.weight": 0.02,
            attention + "q_proj.weight": 0.02, "model.layers.1.mlp.up_proj.weight": 0.02}.items():
        assert peaks[name] == peak


def test_a_steps_gradient_and_means_are_those_of_a_loop_over_tokens(tiny):
    torch.manual_seed(0)
    model = train.make_model("hybrid")
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.2)               # for some hits among the words
    text = torch.randint(4096, (2, 20), generator=torch.Generator().manual_seed(1))
    ids, marks, right = train.task_batch(["cwe", "vt"], 256, Random(4), TOKENIZER)
    best = model(ids, use_cache=False).logits.argmax(-1)
    answers = (marks >= 2).nonzero().tolist()
    for row, t in answers[::3]:
        right[row, t, -1] = best[row, t - 1]                        # right in every third place
    means, wrong = train.backward(model, text, ids, marks, right, step=7)
    found = [parameter.grad.clone() for parameter in model.parameters()]

    log_p = model(text, use_cache=False).logits.log_softmax(-1)
    expected = {"text": [], "context": [], "question": [], "answer": [[], []]}
    for row in range(2):
        for t in range(1, 20):
            expected["text"].append(-log_p[row, t - 1, text[row, t]])
    log_p = model(ids, use_cache=False).logits.log_softmax(-1)
    draw = torch.rand(marks.shape, generator=torch.Generator().manual_seed(7))
    missed = torch.zeros_like(wrong)
    for row, t in (marks >= 0).nonzero().tolist():
        choices = sorted(set(right[row, t].tolist()) - {-1})
        loss = -log_p[row, t - 1, choices].exp().sum().log()
        if marks[row, t] == 1:
            expected["question"].append(loss)
        elif marks[row, t] > 1:
            expected["answer"][row].append(loss)
            missed[row, t] = best[row, t - 1].item() not in choices
        elif draw[row, t] <= 0.25:
            expected["context"].append(loss)
    mean = {kind: torch.stack(losses).mean() for kind, losses in expected.items()
            if kind != "answer"}
    mean["answer"] = sum(torch.stack(losses).mean() for losses in expected["answer"]) / 2
    model.zero_grad()
    (mean["text"] + mean["answer"] + 0.5 * mean["question"] + 0.1 * mean["context"]).backward()
    assert means == pytest.approx({kind: value.item() for kind, value in mean.items()}, rel=1e-4)
    assert torch.equal(wrong, missed) and 0 < missed.sum() < len(answers)
    for gradient, parameter in zip(found, model.parameters()):
        torch.testing.assert_close(gradient, parameter.grad, rtol=1e-3,
                                   atol=1e-4 * parameter.grad.abs().max().item())


# ---- the run ------------------------------------------------------------------------------------

def test_training_lowers_the_loss_and_writes_a_checkpoint_like_the_bundled_one(tiny):
    out, squares = tiny / "out", []

    def measure(optimizer, *_):
        gradients = [p.grad for group in optimizer.param_groups for p in group["params"]]
        squares.append(sum(gradient.square().sum().item() for gradient in gradients))

    hook = register_optimizer_step_pre_hook(measure)
    train.train(name="recurrent", steps=16, out=str(out))
    hook.remove()
    norms = [(muon + adam) ** 0.5 for muon, adam in zip(squares[::2], squares[1::2])]
    assert len(norms) == 16 and max(norms) == pytest.approx(1, abs=1e-4)    # clipped to 1
    log = read_log(out)
    assert [line["step"] for line in log] == list(range(2, 17, 2))
    assert log[-1]["question"] < log[0]["question"] - 0.03
    assert log[-1].keys() == read_log(HERE / "recurrent")[-1].keys()
    for file in ("config.json", "tokenizer.json"):
        given = json.loads((tiny / "recurrent" / file).read_text())
        assert json.loads((out / file).read_text()) == given
    bundled = load_file(HERE / "recurrent" / "model.safetensors")
    for name, weights in load_file(out / "model.safetensors").items():
        assert weights.dtype == bundled[name].dtype
    trained = torch.load(out / "checkpoint.pt", weights_only=True)["model"]
    run = gdn.open_model(str(out), "cpu")
    gdn.load_model(run)
    net = run.net
    for name, weights in net.state_dict().items():
        torch.testing.assert_close(weights, trained[name], rtol=2 ** -8, atol=0)


def test_text_comes_as_long_as_the_tasks_and_in_the_end_a_tenth_of_it_in_4096_tokens(
        tiny, monkeypatch):
    shapes = []

    def all_wrong(model, text, ids, marks, right, step):
        shapes.append((step, *text.shape, *ids.shape))
        return {"text": 8.0}, marks >= 2

    monkeypatch.setattr(train, "backward", all_wrong)
    monkeypatch.setattr(train, "GROWING", {"recurrent": 10})
    monkeypatch.setattr(train, "TASK_TOKENS", 1024)
    train.train(name="recurrent", steps=40, minutes=10.0)
    for step, rows, window, sequences, length in shapes:
        assert rows * window == max(window, 256) and sequences == 1024 // length
        if step < 10:
            assert window == 256 and length == 128
        else:
            assert window in (max(length, 256), 4096) and length > 128
    assert 0 < sum(window == 4096 for _, _, window, *_ in shapes) < 10
    log = read_log(tiny / "recurrent")
    assert log[-1]["tokens"] == sum(r * w + n * t for _, r, w, n, t in shapes)
    assert log[-1]["length"] == train.SHORTEST and set(log[-1]["skill"].values()) == {0}


def test_a_run_stopped_after_two_steps_goes_on_to_the_log_and_weights_of_an_unbroken_one(
        tiny, monkeypatch):
    train.train(name="hybrid", steps=4, out=tiny / "unbroken")
    stopped = ["train.py", "--name", "hybrid", "--steps", "4", "--out", str(tiny / "stopped")]
    for minutes, steps in (("0", [2]), ("0.5", [2, 4])):
        monkeypatch.setattr(sys, "argv", [*stopped, "--minutes", minutes])
        gdn.command(train.train)
        assert [line["step"] for line in read_log(tiny / "stopped")] == steps
    assert read_log(tiny / "stopped") == read_log(tiny / "unbroken")
    one, other = (load_file(tiny / way / "model.safetensors") for way in ("stopped", "unbroken"))
    assert all(torch.equal(one[name], other[name]) for name in other)


def test_the_learning_rate_rises_over_100_steps_and_falls_over_the_last_two_fifths(
        tiny, monkeypatch):
    monkeypatch.setattr(train, "EVERY", 1)
    saved = tiny / "recurrent" / "checkpoint.pt"
    train.train(steps=1)
    state = torch.load(saved, weights_only=True)
    for step, share in ((1, 0.02), (200, 1.0), (998, 0.005)):       # of 1,000
        torch.save(state | {"step": step}, saved)
        train.train(steps=1000, minutes=0.0)
        for optimizer in ("muon", "adam"):
            for group in torch.load(saved, weights_only=True)[optimizer]["param_groups"]:
                assert group["lr"] == pytest.approx(share * group["peak"])


class Code:
    def __reduce__(self):
        return os.mkdir, ("ran",)


@pytest.mark.parametrize("damage", ["empty", "text", "cut", "code", "other", "part"])
def test_a_checkpoint_that_is_none_is_one_sentence_and_none_of_its_code_runs(
        tiny, monkeypatch, damage):
    monkeypatch.chdir(tiny)
    saved = tiny / "recurrent" / "checkpoint.pt"
    model = train.make_model("hybrid" if damage == "other" else "recurrent")
    muon, adam = train.make_optimizers(model)
    held = {"model": model.state_dict(), "muon": muon.state_dict(), "adam": adam.state_dict()}
    if damage == "code":
        held["log"] = Code()
    torch.save(held, saved)                                         # part: without step, skill, ...
    content = {"empty": b"", "text": b"no checkpoint", "cut": saved.read_bytes()[:5000]}
    saved.write_bytes(content.get(damage, saved.read_bytes()))
    monkeypatch.setattr(sys, "argv", ["train.py", "--steps", "2"])
    with pytest.raises(SystemExit) as stop:
        gdn.command(train.train)
    sentence = str(stop.value)
    assert sentence.startswith(f"error: cannot go on from {saved} (") and "\n" not in sentence
    assert not (tiny / "ran").exists()


@pytest.mark.parametrize("flags", [("--name", "hybird"), ("--steps", "0"), ("--steps", "x"),
                                   ("--minutes", "soon"), ("--minutes",)])
def test_a_bad_value_is_one_sentence_and_trains_nothing(tiny, monkeypatch, flags):
    monkeypatch.setattr(sys, "argv", ["train.py", "--out", str(tiny / "out"), *flags])
    with pytest.raises(SystemExit) as stop:
        gdn.command(train.train)
    assert str(stop.value).startswith("error: --") and "\n" not in str(stop.value)
    assert not (tiny / "out").exists()


def test_the_file_runs_as_a_program_from_anywhere_and_refuses_what_it_does_not_know(tmp_path):
    done = subprocess.run([sys.executable, HERE / "train.py", "--stpes", "5", "--out", "out"],
                          cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert done.returncode == 2 and "--stpes" in done.stderr and not any(tmp_path.iterdir())

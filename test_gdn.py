"""Tests: every function against a plain oracle or a known answer, and the scripts as they are run.

    python -m pytest -q
"""
import functools
import gzip
import hashlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from random import Random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import transformers
from torch.testing import assert_close
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache
from transformers.models.qwen3_5 import modeling_qwen3_5 as qwen

import gdn

transformers.logging.set_verbosity_error()
torch.set_num_threads(1)                    # several gain nothing here, and wait on a busy machine
HERE = Path(__file__).resolve().parent


def script(name):
    spec = importlib.util.spec_from_file_location(name.replace("/", "_"), HERE / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


SCRIPTS = ("01_spectrum", "02_decay", "03_loss", "04_ruler", "05_report")
spectrum, decay, loss, ruler, report = map(script, SCRIPTS)
NOBAR = tqdm(disable=True)

# ---- small models with random weights, of all four families --------------------------------------

LAYERS = [0, 1]                                                 # the GDN layers of three
SMALL = dict(vocab_size=256, hidden_size=32, intermediate_size=48, num_hidden_layers=3,
             layer_types=["linear_attention", "linear_attention", "full_attention"],
             num_attention_heads=2, num_key_value_heads=1, head_dim=16, linear_num_key_heads=2,
             linear_num_value_heads=4, linear_key_head_dim=16, linear_value_head_dim=16,
             eos_token_id=0, pad_token_id=0)
EXPERTS = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24,
               shared_expert_intermediate_size=24)
FAMILIES = {"qwen3_5": ("Qwen3_5ForCausalLM", "Qwen3_5TextConfig", {}),
            "qwen3_5_moe": ("Qwen3_5MoeForCausalLM", "Qwen3_5MoeTextConfig", EXPERTS),
            "qwen3_next": ("Qwen3NextForCausalLM", "Qwen3NextConfig", EXPERTS),
            "olmo_hybrid": ("OlmoHybridForCausalLM", "OlmoHybridConfig",
                            dict(linear_num_value_heads=2, linear_value_head_dim=24))}


def random_model(family="qwen3_5", **more):
    torch.manual_seed(0)
    model, config, own = FAMILIES[family]
    config = getattr(transformers, config)(**{**SMALL, **own, **more})
    net = getattr(transformers, model)(config).eval()
    for p in net.parameters():
        if p.ndim > 1:                          # with transformers' 0.02 the states hardly matter
            torch.nn.init.normal_(p, std=0.3)
    for m in net.modules():
        if hasattr(m, "A_log"):
            m.A_log.data.uniform_(-5, 1)        # horizons from a token to hundreds
    return net


@pytest.fixture(scope="module", params=FAMILIES)
def net(request):
    return random_model(request.param)


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(HERE / "tiny" / "hybrid")


@pytest.fixture(scope="module")
def small(tmp_path_factory, tokenizer):
    """A saved checkpoint, with a tokenizer, that runs in no time: states 16 x 16."""
    folder = tmp_path_factory.mktemp("models") / "small"
    net = random_model(vocab_size=4096)
    net.generation_config.eos_token_id = [5, 9]
    net.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    """Eight documents, of some hundred tokens each."""
    file = tmp_path_factory.mktemp("texts") / "texts.jsonl"
    lines = [json.dumps({"text": " ".join(ruler.prose(15, Random(i)))}) for i in range(8)]
    file.write_text("\n".join(lines))
    return str(file)


def ids_of(n, rows=1):
    generator = torch.Generator().manual_seed(n)
    return torch.randint(1, 256, (1, n), generator=generator).expand(rows, -1)


def new_cache(net):
    return DynamicCache(config=net.config)


def svd_cut(state, rank, keep="top"):
    """A matrix with `rank` of its modes, by a plain float64 SVD."""
    u, s, vh = np.linalg.svd(np.asarray(state, dtype=np.float64), full_matrices=False)
    modes = range(len(s))[:rank] if keep == "top" else range(len(s))[len(s) - rank:]
    return sum((s[j] * np.outer(u[:, j], vh[j]) for j in modes), np.zeros(state.shape))


@torch.inference_mode()
def plain_run(net, ids, segment, rank=None, keep="top", mask=None):
    """Logits [T, W], and the states [boundary][layer][head] as numpy [V, K], before the cut."""
    cache, logits, states = new_cache(net), [], []
    for start in range(0, ids.shape[1], segment):
        if start:
            states.append([])
            for layer, i in enumerate(LAYERS):
                stored = cache.layers[i].recurrent_states[0][0]             # [H, K, V]
                states[-1].append([head.T.double().numpy().copy() for head in stored])
                for head, state in enumerate(states[-1][-1]):
                    if rank is not None and (mask is None or mask[layer, head]):
                        stored[head] = torch.tensor(svd_cut(state, rank, keep)).T
        part = ids[:, start:start + segment]
        logits.append(net(part, cache=cache, use_cache=True).logits[0])
    return torch.cat(logits), states


# ---- 1. the recurrence ---------------------------------------------------------------------------

def random_inputs(T, G=2, H=4, K=8, V=12, dtype=torch.float64):
    g = torch.Generator().manual_seed(T)
    q, k = torch.randn(2, 2, T, G, K, generator=g, dtype=dtype)
    v = torch.randn(2, T, H, V, generator=g, dtype=dtype)
    b = torch.rand(2, T, H, generator=g, dtype=dtype)
    log_a = -torch.rand(2, T, H, generator=g, dtype=dtype) * torch.logspace(-4, 0, H)
    q = q / q.norm(dim=-1, keepdim=True) * K ** -0.5
    return q, k / k.norm(dim=-1, keepdim=True), v, log_a, b


def test_recurrence_is_the_posts_equation_written_with_explicit_outer_products():
    q, k, v, log_a, b = random_inputs(5)
    y, S = gdn.gated_delta_rule(q, k, v, log_a, b)
    for row in range(2):
        for head in range(4):
            want = torch.zeros(12, 8, dtype=torch.float64)
            for t in range(5):
                a, key = log_a[row, t, head].exp(), k[row, t, head // 2]
                missing = v[row, t, head] - a * want @ key
                want = a * want + b[row, t, head] * torch.outer(missing, key)
                assert_close(y[row, t, head], want @ q[row, t, head // 2])
            assert_close(S[row, head], want)


def test_recurrence_goes_on_from_a_given_state_without_changing_it():
    inputs = random_inputs(30)
    y, S = gdn.gated_delta_rule(*inputs)
    first, middle = gdn.gated_delta_rule(*(x[:, :11] for x in inputs))
    kept = middle.clone()
    second, end = gdn.gated_delta_rule(*(x[:, 11:] for x in inputs), state=middle)
    assert_close(torch.cat([first, second], 1), y)
    assert_close(end, S)
    assert torch.equal(middle, kept)


@pytest.mark.parametrize("rule", ["torch_chunk_gated_delta_rule",
                                  "torch_recurrent_gated_delta_rule"])
def test_recurrence_equals_both_kernels_of_transformers_with_grouped_heads_and_a_state(rule):
    q, k, v, log_a, b = random_inputs(150, dtype=torch.float32)
    _, state = gdn.gated_delta_rule(*random_inputs(9, dtype=torch.float32))
    y, S = gdn.gated_delta_rule(q, k, v, log_a, b, state)
    theirs, theirs_S = getattr(qwen, rule)(q * 8 ** 0.5, k, v, g=log_a, beta=b,
                                           initial_state=state.mT, output_final_state=True)
    assert_close(theirs, y, atol=1e-5, rtol=1e-5)
    assert_close(theirs_S.mT, S, atol=1e-5, rtol=1e-5)


def test_decay_horizon_inverts_a_mean_of_logarithms_and_a_head_without_decay_never_forgets():
    horizon = gdn.decay_horizon([-0.2505, 0.0, -0.0, -1.0])
    assert horizon.tolist() == [pytest.approx(1 / 0.2505), float("inf"), float("inf"), 1.0]
    with pytest.raises(gdn.Error, match="above 0"):
        gdn.decay_horizon(torch.tensor([-1.0, 1e-9]))


# ---- 2. the state --------------------------------------------------------------------------------

def spectra():
    """(name, matrices [4, 24, 24] in float64) of known spectra."""
    g = torch.Generator().manual_seed(1)
    left, right = torch.linalg.qr(torch.randn(2, 4, 24, 24, generator=g, dtype=torch.float64)).Q
    for name, sigma in {"flat": torch.linspace(1, 0.9, 24), "steep": torch.logspace(0, -12, 24),
                        "degenerate": torch.tensor([2.0] * 6 + [1.0] * 12 + [0.1] * 6),
                        "rank-deficient": torch.tensor([3.0, 2.0, 1.0] + [0.0] * 21),
                        "zero": torch.zeros(24)}.items():
        yield pytest.param(left * sigma.double() @ right.mT, id=name)


SHAPES = pytest.mark.parametrize("shape", [(24, 24), (24, 10), (10, 24)])


@pytest.mark.parametrize("state", [*spectra()])
@SHAPES
@pytest.mark.parametrize("scale", [1, 1e-30, 1e30])
def test_modes_are_the_singular_values_and_vectors_of_a_float64_svd(state, shape, scale):
    state = scale * state[:, :shape[0], :shape[1]]
    sigma, vectors = gdn.modes(state)
    want = torch.linalg.svdvals(state)                                      # largest first
    M = min(shape)
    largest = want[:, :1]
    assert sigma.shape == (4, M) and vectors.shape == (4, shape[1], M)
    assert ((sigma - want).abs() <= 3e-8 * largest).all()                   # 2 sqrt(eps)
    assert (sigma.diff() <= 0).all()
    assert_close(vectors.mT @ vectors, torch.eye(M).double().expand(4, M, M), atol=1e-12, rtol=0)
    lengths = (state @ vectors).norm(dim=-2)
    assert ((lengths - want).abs() <= 3e-8 * largest).all()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_state_with_nan_or_infinity_is_an_error_that_says_so(bad):
    state = torch.randn(2, 5, 5)
    state[1, 2, 3] = bad
    for measure in (gdn.modes, lambda s: gdn.truncate(s, 2), lambda s: gdn.truncate(s, 5)):
        with pytest.raises(gdn.Error, match="NaN or infinity"):
            measure(state)


def test_effective_rank_is_n_for_n_equal_values_one_for_one_and_zero_for_none():
    sigma = torch.tensor([[2.0, 2, 2, 2], [5, 0, 0, 0], [0, 0, 0, 0], [1e-38, 1e-38, 0, 0]])
    assert_close(gdn.effective_rank(sigma), torch.tensor([4.0, 1, 0, 2]))
    by_hand = np.exp(-(0.5 * np.log(0.5) + 0.3 * np.log(0.3) + 0.2 * np.log(0.2)))
    assert gdn.effective_rank(torch.tensor([3.5, 2.1, 1.4])).item() == pytest.approx(by_hand)


@pytest.mark.parametrize("state", [*spectra()])
@SHAPES
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_truncation_is_as_near_to_the_state_as_a_float64_svd_gets(state, shape, dtype):
    state = state[:, :shape[0], :shape[1]].to(dtype)
    sigma = torch.linalg.svdvals(state.double())                            # [4, M]
    for rank in (1, 3, 9):
        cut = gdn.truncate(state, rank)
        assert cut.dtype == dtype and cut.shape == state.shape
        error = torch.linalg.matrix_norm(state.double() - cut.double())
        best = sigma[:, rank:].square().sum(-1).sqrt()                      # Eckart & Young
        rounding = 8 * torch.finfo(dtype).eps * torch.linalg.matrix_norm(state.double())
        assert (error <= best * (1 + 1e-6) + rounding).all()
        if dtype == torch.float64:
            assert (torch.linalg.matrix_rank(cut, rtol=1e-9) <= rank).all()
            gap = sigma[:, rank - 1] - sigma[:, rank] > 1e-4                # the modes are unique
            for matrix in gap.nonzero()[:, 0]:
                want = torch.tensor(svd_cut(state[matrix], rank))
                assert_close(cut[matrix], want, atol=1e-9, rtol=0)


def test_rank_0_wipes_the_state_and_a_rank_of_all_modes_leaves_every_bit_of_it():
    state = torch.randn(3, 2, 8, 6, generator=torch.Generator().manual_seed(0))
    for all_modes in (6, 99):
        assert torch.equal(gdn.truncate(state, all_modes), state)
    assert not gdn.truncate(state, 0).any()
    mixed = gdn.truncate(state, torch.tensor([[6], [0], [7]]))
    assert torch.equal(mixed[[0, 2]], state[[0, 2]]) and not mixed[1].any()
    assert not torch.equal(gdn.truncate(state, 5), state)


def test_a_single_matrix_has_the_modes_it_has_in_a_batch(two_threads):
    state = torch.randn(2, 7, 5, dtype=torch.float64)
    for got, want in zip(gdn.modes(state[1]), gdn.modes(state)):
        assert_close(got, want[1])
    assert_close(gdn.truncate(state[1], 2), gdn.truncate(state, 2)[1])
    several = gdn.truncate(state[1], torch.tensor([2, 0, 5]))
    assert_close(several, gdn.truncate(state[1:], torch.tensor([[2], [0], [5]]))[:, 0])


@pytest.mark.parametrize("keep", gdn.KEEP)
def test_truncation_to_a_tensor_of_ranks_equals_one_call_a_rank_also_for_a_shared_state(keep):
    ranks = torch.tensor([4, 1, 9, 0])
    state = torch.randn(5, 4, 3, 9, 9, dtype=torch.float64)
    cut = gdn.truncate(state, ranks[:, None], keep)
    shared = gdn.truncate(state[:, :1, 0], ranks, keep)                     # [5, 1, 9, 9] and [4]
    assert shared.shape == (5, 4, 9, 9)
    for row, rank in enumerate(ranks.tolist()):
        alone = gdn.truncate(state[:, row:row + 1], torch.tensor([[rank]]), keep)
        assert_close(cut[:, row:row + 1], alone)
        assert_close(shared[:, row:row + 1], gdn.truncate(state[:, :1, 0], rank, keep))


@pytest.mark.parametrize("rank", [-3, 1.5, 2.0, True, torch.tensor([2, -1])])
def test_truncation_refuses_what_is_no_rank(rank):
    with pytest.raises(gdn.Error, match="whole number"):
        gdn.truncate(torch.randn(2, 5, 5), rank)


def test_the_controls_keep_the_smallest_and_random_modes_of_the_same_number():
    state = torch.randn(4, 3, 6, 6, dtype=torch.float64)
    ranks = torch.tensor([2, 3, 4])
    assert_close(gdn.truncate(state, 2) + gdn.truncate(state, 4, "bottom"), state)
    sigma, random = gdn.modes(state)[0], gdn.truncate(state, ranks, "random", seed=5)
    chosen = []
    for row, rank in enumerate(ranks.tolist()):
        kept = gdn.modes(random[:, row])[0]                                 # [4, 6]
        distance = (kept[:, :, None] - sigma[:, row, None, :]).abs()        # [4, 6, 6]
        assert (distance[:, :rank].amin(-1) < 1e-9).all() and (kept[:, rank:] < 1e-6).all()
        chosen += [tuple(d[:rank].argmin(-1).tolist()) for d in distance]
    assert len(set(chosen)) > 8                                             # anew for each matrix
    shared = gdn.modes(gdn.truncate(state[:, :1], ranks, "random", seed=5))[0].round(decimals=6)
    for fewer, more in ((0, 1), (1, 2)):                                    # ranks are nested
        for matrix in range(4):
            held = set(shared[matrix, fewer].tolist())
            assert held <= set(shared[matrix, more].tolist())
    assert not torch.allclose(random, gdn.truncate(state, ranks, "random", seed=6))
    with pytest.raises(gdn.Error, match="keep is one of"):
        gdn.truncate(state, 2, "middle")


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def test_modes_on_every_core_are_those_of_one_thread(two_threads):
    state = torch.randn(37, 2, 12, 9, dtype=torch.float64)
    several, cut = gdn.modes(state), gdn.truncate(state, torch.tensor([3, 5]), "random", 1)
    torch.set_num_threads(1)
    for got, want in zip(several, gdn.modes(state)):
        assert_close(got, want)
    assert_close(cut, gdn.truncate(state, torch.tensor([3, 5]), "random", 1))


def test_parts_run_side_by_side_on_a_thread_each_and_the_number_of_threads_is_restored(two_threads):
    together = threading.Barrier(2, timeout=20)

    def work(part, fail=False):
        together.wait()
        if fail:
            raise ValueError("broken")
        return part.tolist(), torch.get_num_threads()

    def threads_of_a_new_thread():
        found = []
        thread = threading.Thread(target=lambda: found.append(torch.get_num_threads()))
        thread.start()
        thread.join()
        return found

    parts = gdn.on_every_core(work, torch.arange(40))
    assert sum((part for part, _ in parts), []) == list(range(40))
    assert {threads for _, threads in parts} == {1}
    assert torch.get_num_threads() == 2 and threads_of_a_new_thread() == [2]
    with pytest.raises(ValueError, match="broken"):
        gdn.on_every_core(functools.partial(work, fail=True), torch.arange(2))
    assert torch.get_num_threads() == 2 and threads_of_a_new_thread() == [2]


@pytest.mark.parametrize("fault, failed",
                         [("raises", 6), ("vectors", 2), ("values", 2), ("nan", 2)])
def test_what_an_eigensolver_gets_wrong_without_a_word_is_solved_again_and_said(
        fault, failed, monkeypatch, capsys):
    monkeypatch.setattr(gdn.say_once, "__defaults__", (set(),))
    half = torch.randn(6, 9, 9, dtype=torch.float64)
    gram = half.mT @ half * torch.logspace(-20, 20, 6).double()[:, None, None]
    gram[2] = 0

    def solve(matrices):
        if fault == "raises":
            raise torch.linalg.LinAlgError("failed to converge")
        values, vectors = torch.linalg.eigh(matrices)
        vectors = -vectors                                                  # as good, but ours
        if fault == "vectors":
            vectors[[1, 4]] = torch.eye(9).double()
        if fault == "values":
            values[[1, 4]] *= 1.001
        if fault == "nan":
            vectors[[1, 4]] = torch.nan
        return values, vectors

    for _ in range(2):
        values, vectors = gdn.checked_eigh(gram, solve)
        right, theirs = torch.linalg.eigh(gram)
        assert_close(values, right)
        assert_close(vectors.abs(), theirs.abs(), atol=1e-9, rtol=0)
        if fault != "raises":
            assert torch.equal(vectors[[0, 2, 3, 5]], -theirs[[0, 2, 3, 5]])
    assert capsys.readouterr().err.count(f"failed on {failed} of 6 matrices") == 1
    assert torch.equal(gdn.checked_eigh(gram, torch.linalg.eigh)[1], theirs)
    assert capsys.readouterr().err == ""


# ---- 3. the run ----------------------------------------------------------------------------------

@pytest.mark.parametrize("segment", [64, 50, 1])
def test_segments_continue_the_recurrence_and_the_convolution_as_one_call_does(net, segment):
    ids = ids_of(128 if segment > 1 else 40, rows=2)
    with torch.no_grad():
        want = net(ids).logits
    hidden, boundaries = [], []
    for start, part, boundary in gdn.segments(net, ids, segment, new_cache(net)):
        assert start == sum(x.shape[1] for x in hidden)
        hidden.append(part)
        if boundary:
            boundaries.append(start + part.shape[1])
    with torch.inference_mode():
        got = net.get_output_embeddings()(torch.cat(hidden, 1))
    assert_close(got, want, atol=2e-5 * want.abs().max().item(), rtol=0)
    assert boundaries == list(range(segment, ids.shape[1], segment))        # not at the very end


def test_a_run_that_goes_on_has_a_boundary_where_a_prompt_ends_on_one_and_keeps_its_rows():
    net, ids = random_model(), ids_of(100)
    cache = new_cache(net)
    shown = []
    for feed, position in ((ids[:, :64], 0), (ids[:, 64:70], 64), (ids[:, 70:], 70)):
        for start, hidden, boundary in gdn.segments(net, feed, 32, cache, position, end=100):
            shown.append((start, *hidden.shape[:2], boundary))
            if start == 0:
                cache.reorder_cache(torch.zeros(3, dtype=torch.long))       # one row becomes three
    assert shown == [(0, 1, 32, True), (32, 3, 32, True), (64, 3, 6, False), (70, 3, 26, True),
                     (96, 3, 4, False)]
    assert_close(hidden[2], net.base_model(ids).last_hidden_state[0, 96:], atol=1e-4, rtol=1e-4)


def test_overflow_and_a_release_that_ignores_the_cache_are_errors_not_results():
    net, ids = random_model(), ids_of(40)
    forgetful = SimpleNamespace(base_model=lambda ids, cache, use_cache: net.base_model(ids))
    with pytest.raises(gdn.Error, match="install 5.24.0 or later"):
        next(gdn.segments(forgetful, ids, 32, new_cache(net)))
    net.model.layers[1].mlp.up_proj.weight.data[3, 3] = torch.nan
    with pytest.raises(gdn.Error, match="NaN or infinite by token 32"):
        next(gdn.segments(net, ids, 32, new_cache(net)))


def record(net, ids, segment=32):
    """The run's recorded calls [call of the model][GDN layer], and the states before each call."""
    cache, calls, states = new_cache(net), [], [None]
    with gdn.recorded_rule(net) as recorded:
        for _ in gdn.segments(net, ids, segment, cache):
            calls.append(list(recorded))
            states.append(gdn.read_states(cache, LAYERS))
            recorded.clear()
    return calls, states


def test_states_read_from_the_cache_are_those_of_the_reference_on_the_recorded_inputs(net):
    calls, states = record(net, ids_of(71, rows=2))                         # 32, 32 and 7 tokens
    assert [len(layers) for layers in calls] == [2, 2, 2]
    for before, layers, after in zip(states, calls, states[1:]):
        for i, (_, q, k, v, others) in enumerate(layers):
            start = None if before is None else before[i]
            _, want = gdn.gated_delta_rule(q, qwen.l2norm(k), v, others["g"], others["beta"], start)
            assert_close(after[i], want, atol=1e-4 * want.abs().max().item(), rtol=0)


def own_gates(layer, x):
    """log a and b from the layer's own projections."""
    if hasattr(layer, "in_proj_ba"):                                        # grouped by key head
        both = layer.in_proj_ba(x).unflatten(-1, (layer.num_k_heads, 2, -1))
        b, a = both[..., 0, :].flatten(-2), both[..., 1, :].flatten(-2)
    else:
        b, a = (getattr(layer, f"in_proj_{x}", getattr(layer, f"{x}_proj", None)) for x in "ba")
        b, a = b(x), a(x)
    log_a = -layer.A_log.exp() * torch.nn.functional.softplus(a + layer.dt_bias)
    return log_a, b.sigmoid() * (2 if getattr(layer, "allow_neg_eigval", False) else 1)


def test_02_averages_what_every_layer_computes_from_its_own_projections(net):
    layers = [m for m in net.modules() if type(m).__name__.endswith("GatedDeltaNet")]
    module = sys.modules[type(layers[0]).__module__]
    names = ("torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule")
    before, inputs = [getattr(module, name) for name in names], {0: [], 1: []}
    hooks = [layer.register_forward_pre_hook(lambda m, args, kwargs, i=i: inputs[i].append(
        kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]), with_kwargs=True)
        for i, layer in enumerate(layers)]
    found = decay.measure(net, LAYERS, ids_of(65), 32, NOBAR)               # 32, 32, and 1
    for hook in hooks:
        hook.remove()
    assert [getattr(module, name) for name in names] == before
    with torch.inference_mode():
        for i, layer in enumerate(layers):
            log_a, b = own_gates(layer, torch.cat(inputs[i], 1))
            assert found["log_a"][i] == pytest.approx(log_a[0].mean(0).tolist(), rel=1e-4)
            assert found["write_strength"][i] == pytest.approx(b[0].mean(0).tolist(), rel=1e-4)


def plain_queries(call):
    """q~ [n, H, K] by multiplying the factors out: P <- P a (I - b k k^T), then P q."""
    _, q, k, v, others = call
    q, k = (qwen.l2norm(x)[0].double().numpy() for x in (q, k))             # [n, G, K]
    n, H, (G, K) = len(q), v.shape[2], k.shape[1:]
    a, b = others["g"][0].double().exp().numpy(), others["beta"][0].double().numpy()
    found = np.empty((n, H, K))
    for h in range(H):
        P, g = np.eye(K), h * G // H
        for t in range(n):
            P = P @ (a[t, h] * (np.eye(K) - b[t, h] * np.outer(k[t, g], k[t, g])))
            found[t, h] = P @ q[t, g] * K ** -0.5
    return found


def test_effective_queries_are_products_of_factors_and_read_what_a_wiped_state_loses(net):
    calls, states = record(net, ids_of(65))
    for before, layers in zip(states[1:], calls[1:]):                       # 32 tokens, and 1
        for state, call in zip(before, layers):
            got = gdn.effective_queries(*call)
            assert_close(got[0].double(), torch.tensor(plain_queries(call)), atol=1e-5, rtol=1e-4)
            rule, q, k, v, others = call
            whole = rule(q, k, v, **{**others, "initial_state": state.mT})[0]
            wiped = rule(q, k, v, **{**others, "initial_state": torch.zeros_like(state.mT)})[0]
            read = torch.einsum("bhvk,bnhk->bnhv", state, got)
            assert_close(read, whole - wiped, atol=1e-4 * whole.abs().max().item(), rtol=1e-3)


@pytest.mark.parametrize("keep", ["top", "bottom"])
def test_rows_are_truncated_as_a_plain_loop_over_layers_rows_and_heads_would(net, keep):
    cache, ranks = new_cache(net), [None, 3, 0, 16]
    ids = torch.cat([ids_of(n)[:, :40] for n in (41, 42, 43, 44)])
    for _ in gdn.segments(net, ids, 64, cache):
        before = gdn.read_states(cache, LAYERS)
        mask = torch.ones(before.shape[0], before.shape[2], dtype=torch.bool)
        mask[0, 0] = mask[1, 1] = False
        gdn.truncate_rows(cache, LAYERS, ranks, keep, heads=mask)
    after = gdn.read_states(cache, LAYERS)                                  # [L, R, H, V, K]
    for layer, head in np.ndindex(mask.shape):
        for row, rank in enumerate(ranks):
            old, new = before[layer, row, head], after[layer, row, head]
            if not mask[layer, head] or rank in (None, 16):
                assert torch.equal(new, old)
            else:
                want = torch.tensor(svd_cut(old, rank, keep)).float()
                assert_close(new, want, atol=1e-6 * old.norm().item(), rtol=0)
                assert rank or not new.any()


@pytest.mark.parametrize("keep", gdn.KEEP)
def test_one_row_that_becomes_many_at_the_first_boundary_equals_many_from_the_start(net, keep):
    ranks, hidden = [None, 12, 3, 0], {}
    for rows in (1, 4):
        cache = new_cache(net)
        for start, hidden[rows], boundary in gdn.segments(net, ids_of(90, rows), 32, cache):
            if boundary:
                gdn.truncate_rows(cache, LAYERS, ranks, keep, seed=start)
    assert_close(hidden[1], hidden[4], atol=1e-4 * hidden[4].abs().max().item(), rtol=0)
    assert all((hidden[1][i] - hidden[1][j]).abs().max() > 1e-2 for i in range(4) for j in range(i))


def test_loss_kl_and_agreement_are_those_of_a_float64_softmax():
    net = random_model()
    hidden = torch.randn(3, 7, 32, generator=torch.Generator().manual_seed(2))
    hidden[1] = hidden[0] + 0.3 * hidden[1]
    targets = ids_of(7)[0]
    got = gdn.token_losses(net, hidden, targets)
    logits = hidden.double().numpy() @ net.lm_head.weight.detach().double().numpy().T
    p = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    agree = p.argmax(-1) == p[0].argmax(-1)
    assert 0 < agree[1].sum() < 7                                           # both answers occur
    want = -np.log(p[:, range(7), targets]), (p[0] * np.log(p[0] / p)).sum(-1), agree
    for values, oracle in zip(got, want):
        np.testing.assert_allclose(values.numpy(), oracle, atol=2e-5)


def of_heads(measure, *stacks):
    """[layer][head] of measure(one head's entry of each stack), where stacks are [layer][head]."""
    return np.array([[measure(*entries) for entries in zip(*layers)] for layers in zip(*stacks)])


def test_01_measures_what_plain_svds_of_a_plain_run_give(net):
    ids, ranks, T = ids_of(113), (3, 2, 1), 32
    _, other = spectrum.measure(net, LAYERS, ids_of(70), T, ranks, None, {"truncate": 0}, NOBAR)
    found, last = spectrum.measure(net, LAYERS, ids, T, ranks, other, {"truncate": 0}, NOBAR)
    _, states = plain_run(net, ids, T)
    _, others = plain_run(net, ids_of(70), T)
    calls, _ = record(net, ids)

    def right(S, r):
        return np.linalg.svd(S)[2][:r].T                                    # [K, r]

    def sigma(S):
        return np.linalg.svd(S)[1]

    def effective_rank(S):
        p = sigma(S) / sigma(S).sum()
        return np.exp(-(p[p > 0] * np.log(p[p > 0])).sum())

    def same(values, want, tolerance=1e-4):
        np.testing.assert_allclose(np.array(values), want, atol=tolerance, rtol=tolerance)

    assert found["positions"] == [32, 64, 96]
    same(found["effective_rank"], [of_heads(effective_rank, S) for S in states], 1e-3)
    same(found["spectrum"], np.mean([of_heads(lambda S: sigma(S) / sigma(S).sum(), S)
                                     for S in states], 0))
    queries = [[plain_queries(call).swapaxes(0, 1) for call in layers] for layers in calls[1:]]
    for r in ranks:
        def energy(S):
            return (sigma(S)[:r] ** 2).sum() / (sigma(S) ** 2).sum()

        def readout(S, q):                                                  # [V, K] and [n, K]
            return np.square(q @ svd_cut(S, r).T).sum() / np.square(q @ S.T).sum()

        def overlap(S, S2):
            return np.square(right(S, r).T @ right(S2, r)).sum() / r

        same(found["energy"][str(r)], np.mean([of_heads(energy, S) for S in states], 0))
        same(found["readout"][str(r)],
             np.mean([of_heads(readout, S, q) for S, q in zip(states, queries)], 0))
        same(found["overlap"][str(r)],
             np.mean([of_heads(overlap, *pair) for pair in zip(states, states[1:])], 0), 2e-3)
        same(found["overlap_other"][str(r)],
             np.mean([of_heads(overlap, S, others[-1]) for S in states], 0), 2e-3)
    top = [[right(S, 1) for S in layer] for layer in states[-1]]            # [L, H, K, 1]
    same(np.abs(np.sum(last[..., :1].numpy() * top, 2)), 1)
    rerun = spectrum.last_vectors(net, LAYERS, ids_of(70), T)
    assert_close(rerun[..., :3].abs(), other[..., :3].abs(), atol=1e-3, rtol=0)


def test_03_measures_the_loss_kl_and_agreement_of_a_plain_truncated_run(net):
    ids, T, ranks = ids_of(101), 32, [12, 3, 0]
    edges, bins = loss.after_bins(101, T)
    assert edges == [0, 1, 4, 16, 32]
    mask = torch.tensor([[True] * 3 + [False], [True] * 4])[:, :net.config.linear_num_value_heads]
    log_p = {}
    for keep in ("top", "bottom"):
        item = {}
        for group in gdn.row_groups(ranks, rows=2):
            rows = loss.measure(net, LAYERS, ids, T, group, keep, mask, {"truncate": 0}, NOBAR)
            loss.summarise(item, group, rows, bins)
        for rank in (None, *ranks):
            name = "full" if rank is None else str(rank)
            logits = plain_run(net, ids, T, rank, keep, mask)[0]
            log_p[name] = logits[:-1].double().log_softmax(-1)              # [T - 1, W]
            losses = -log_p[name][range(100), ids[0, 1:]]
            after = [[] for _ in range(5)]
            for t, value in enumerate(losses.tolist()):
                at = 0 if t < T else 1 + sum(t % T >= edge for edge in (1, 4, 16))
                after[at].append(value)
            assert item["loss"][name] == pytest.approx(losses.mean().item(), abs=1e-4)
            assert item["after"][name] == pytest.approx([np.mean(x) for x in after], abs=5e-4)
            assert [len(x) for x in after] == bins.bincount().tolist()
            assert item["after"][name][0] == item["after"]["full"][0]       # no truncation yet
            if rank is not None:
                p, full = log_p[name], log_p["full"]
                kl = (full.exp() * (full - p)).sum(-1).mean().item()
                agree = (full.argmax(-1) == p.argmax(-1)).double().mean().item()
                assert item["kl"][name] == pytest.approx(kl, abs=1e-4)
                assert item["agree"][name] == pytest.approx(agree, abs=1e-9)
        assert list(item["kl"]) == ["12", "3", "0"]


# ---- models --------------------------------------------------------------------------------------

def flags_of(stage, **flags):
    """The arguments of a stage, as the command line gives them."""
    if stage is ruler:
        return {"tasks": ("niah_single_1",), "lengths": (150,), "samples": 3, **flags}
    return {"docs": 3, "tokens": 150, **flags}


def test_a_checkpoint_saved_with_its_vision_tower_loads_as_its_text_model(tmp_path, tokenizer):
    vision = dict(depth=1, hidden_size=16, intermediate_size=16, num_heads=2, out_hidden_size=32)
    whole = transformers.Qwen3_5ForConditionalGeneration(transformers.Qwen3_5Config(
        text_config={**SMALL, "vocab_size": 4096}, vision_config=vision)).eval()
    whole.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    run = gdn.open_model(str(tmp_path))
    assert (run.layers, run.heads, run.state, run.dtype) == ([0, 1], 4, [16, 16], torch.float32)
    net = gdn.load_model(run)
    assert type(net).__name__ == "Qwen3_5ForCausalLM"
    with torch.no_grad():
        assert_close(net(ids_of(20)).logits, whole(ids_of(20)).logits)


def changed(folder, to, **config):
    shutil.copytree(folder, to)
    before = json.loads((to / "config.json").read_text())
    (to / "config.json").write_text(json.dumps({**before, **config}))
    return str(to)


def test_what_is_no_gdn_model_or_lacks_a_part_is_refused_with_its_reason(tmp_path, small):
    transformers.LlamaConfig(num_hidden_layers=1).save_pretrained(tmp_path / "llama")
    with pytest.raises(gdn.Error, match="no Gated DeltaNet layers"):
        gdn.open_model(str(tmp_path / "llama"))
    gdn_alone = changed(small, tmp_path / "a", layer_types=["linear_attention"] * 3)
    with pytest.raises(gdn.Error, match="GDN layers alone"):
        gdn.open_model(gdn_alone)
    deeper = changed(small, tmp_path / "b", num_hidden_layers=4,
                     layer_types=[*SMALL["layer_types"], "linear_attention"])
    with pytest.raises(gdn.Error, match=r"lacks weights.*layers\.3"):
        gdn.load_model(gdn.open_model(deeper))
    whole = (tmp_path / "b" / "model.safetensors").read_bytes()
    (tmp_path / "b" / "model.safetensors").write_bytes(whole[:1000])
    with pytest.raises(gdn.Error, match="cannot load the weights"):
        gdn.open_model(deeper)
    (tmp_path / "b" / "model.safetensors").unlink()
    with pytest.raises(gdn.Error, match="no .safetensors"):
        gdn.open_model(deeper)
    (tmp_path / "b" / "tokenizer.json").unlink()
    with pytest.raises(gdn.Error, match="tokenizer"):
        gdn.open_model(deeper)
    with pytest.raises(gdn.Error, match="no folder"):
        gdn.open_model("no/such/folder")
    with pytest.raises(gdn.Error, match="not to be had"):
        gdn.open_model(str(small), device="warp")


def test_the_fingerprint_does_not_hang_on_dtype_or_files_and_tells_trained_weights(tmp_path, small):
    before = gdn.open_model(str(small)).environment["weights"]
    assert gdn.open_model(str(small), dtype="bfloat16").environment["weights"] == before
    net = AutoModelForCausalLM.from_pretrained(small)
    net.save_pretrained(tmp_path / "shards", max_shard_size="20KB")
    assert gdn.fingerprint(tmp_path / "shards") == before
    net.lm_head.weight.data[1000:] *= 1.001
    net.save_pretrained(tmp_path / "trained")
    assert gdn.fingerprint(tmp_path / "trained") != before


def test_a_hub_model_comes_from_the_cache_and_what_is_missing_there_from_the_hub(
        small, monkeypatch, tmp_path):
    snapshot, asked = tmp_path / "snapshot", []

    def download(model, allow_patterns, local_files_only=False):
        weights = "*.safetensors" in allow_patterns
        asked.append(("weights" if weights else "the rest", local_files_only))
        if local_files_only and not snapshot.exists():
            raise gdn.huggingface_hub.errors.LocalEntryNotFoundError("not here")
        if not local_files_only:
            skip = shutil.ignore_patterns(*[] if weights else ["*.safetensors"])
            shutil.copytree(small, snapshot, ignore=skip, dirs_exist_ok=True)
        return str(snapshot)

    def opened():
        asked.clear()
        arguments = {"model": ("some/one-1.5B",), "device": "cpu", "dtype": "auto",
                     "results": str(tmp_path)}
        run, = gdn.plan("03_loss", arguments)
        assert (run.model, run.output) == ("some/one-1.5B", tmp_path / "one-1.5B")
        assert run.environment["weights"] == gdn.fingerprint(small)
        return asked

    monkeypatch.setattr(gdn.huggingface_hub, "snapshot_download", download)
    cached = [("the rest", True), ("weights", True)]
    fetched = [("the rest", True), ("the rest", False), ("weights", True), ("weights", False)]
    assert opened() == fetched
    assert opened() == cached
    (snapshot / "model.safetensors").unlink()                               # a part in the cache
    assert opened() == [*cached, ("weights", False)]
    index = {"weight_map": {"a": "model.safetensors", "b": "model-2.safetensors"}}
    (snapshot / "model.safetensors.index.json").write_text(json.dumps(index))
    assert opened() == [*cached, ("weights", False)]
    (snapshot / "model.safetensors.index.json").unlink()
    (snapshot / "tokenizer_config.json").unlink()
    assert opened() == [("the rest", True), ("the rest", False), ("weights", True)]


def test_no_hub_within_reach_and_an_impossible_hub_id_are_one_sentence(monkeypatch, tmp_path):
    monkeypatch.setattr(gdn.huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(gdn.huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    for model in ("no/such-model", "no--such", "nobody/" + "x" * 120):
        with pytest.raises(gdn.Error, match="cannot load|hub id"):
            gdn.open_model(model)


def test_layers_spread_over_memory_and_disk_give_the_losses_of_the_cpu(tmp_path, small):
    ids, items = ids_of(100), []
    for device, placement in (("cpu", {}), ("map", dict(max_memory={"cpu": "1100KB"},
                                                        offload_folder=str(tmp_path)))):
        run = gdn.open_model(str(small), device=device)
        net = gdn.load_model(run, **placement)
        items.append(loss.measure(net, run.layers, ids, 32, [None, 3, 0], "top", None,
                                  {"truncate": 0}, NOBAR))
    assert "disk" in net.hf_device_map.values() and "cpu" in net.hf_device_map.values()
    assert_close(items[1], items[0], atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", ["hybrid", "recurrent"])
def test_a_bundled_model_loads_like_any_checkpoint_is_small_and_knows_text(name):
    folder = HERE / "tiny" / name
    files = [path for path in folder.iterdir() if "checkpoint" not in path.name]
    assert sum(path.stat().st_size for path in files) < 5_000_000
    run = gdn.open_model(f"tiny/{name}")
    net = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    assert type(net).__name__ == "Qwen3_5ForCausalLM" and net.dtype == torch.float32
    assert len(run.layers) * run.heads >= 12 and run.state == [64, 64]
    text = "def f(x):\n    return 12345"
    assert run.tokenizer.decode(run.tokenizer(text).input_ids) == text
    assert len(run.tokenizer("12345").input_ids) == 5
    _, _, ids = gdn.documents("stdlib", run.tokenizer, 1, 500)[0]
    with torch.no_grad():
        assert net(ids, labels=ids).loss < 5                                # guessing costs 8.3


# ---- documents -----------------------------------------------------------------------------------

def test_documents_come_in_order_from_text_jsonl_gzip_and_folders(tmp_path, tokenizer):
    long, short = "a b c d e f g h " * 20, "too short"
    lines = "\n".join(json.dumps({"text": text}) for text in (short, long, long + "x\ud800"))
    (tmp_path / "one.txt").write_text(long)
    (tmp_path / "two.JSONL").write_text(lines)
    (tmp_path / "three.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    want = tokenizer(long).input_ids[:50]
    for source, names in {
            "one.txt": ["one.txt"], "two.JSONL": ["two.JSONL:2", "two.JSONL:3"],
            "three.jsonl.gz": ["three.jsonl.gz:2"],
            ".": ["one.txt", "three.jsonl.gz:2", "three.jsonl.gz:3", "two.JSONL:2"]}.items():
        found = gdn.documents(str(tmp_path / source), tokenizer, len(names), 50)
        assert [name for name, *_ in found] == names
        assert all(ids.tolist() == [want] for *_, ids in found)
        assert found[0][1] == hashlib.sha256(long.encode()).hexdigest()
    with pytest.raises(gdn.Error, match="has 2 of 3 documents .*longest has.* --docs asks for 3"):
        gdn.documents(str(tmp_path / "two.JSONL"), tokenizer, 3, 50)
    with pytest.raises(gdn.Error, match="existing file or folder"):
        gdn.documents("a" * 400, tokenizer, 1, 50)


@pytest.mark.parametrize("line", ["{", "[1]", '{"txt": "a"}', '{"text": 3}', "[" * 100_000])
def test_a_bad_line_or_a_broken_file_of_documents_is_named(tmp_path, tokenizer, line):
    (tmp_path / "bad.jsonl").write_text('{"text": "fine"}\n' + line)
    with pytest.raises(gdn.Error, match="bad.jsonl, at line 2"):
        gdn.documents(str(tmp_path / "bad.jsonl"), tokenizer, 1, 50)
    (tmp_path / "binary.txt").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(gdn.Error, match="binary.txt as UTF-8"):
        gdn.documents(str(tmp_path / "binary.txt"), tokenizer, 1, 1)
    whole = gzip.compress(b'{"text": "a b c"}\n' * 200)
    damaged = whole[:30] + b"\x00" * 9 + whole[39:]
    for content in (whole[:-9], damaged, b"no gzip", gzip.compress(b"\xff")):
        (tmp_path / "broken.jsonl.gz").write_bytes(content)
        with pytest.raises(gdn.Error, match="broken.jsonl.gz, at line"):
            gdn.documents(str(tmp_path / "broken.jsonl.gz"), tokenizer, 1, 50)


NASTY = {"letters": "x" * 100_000, "pairs": "A" + "ab" * 50_000, "spaces": " " * 100_000,
         "lines": "\n\r\n" * 30_000, "emoji": "\U0001f469\u200d" * 30_000,
         "accents": "e\u0301\u0323" * 30_000, "digits": "0123456789" * 10_000,
         "code": "def f(x):\r\n\treturn 12\r\n" * 4000, "chinese": "\u4f60\u597d" * 40_000,
         "mixed": "word " * 30 + "y" * 99_000 + " end"}


@pytest.mark.parametrize("text", NASTY.values(), ids=NASTY)
def test_the_first_tokens_of_a_nasty_text_are_those_of_the_whole(tokenizer, text):
    whole = tokenizer(text).input_ids
    for count in (1, 100, 3000):
        assert gdn.first_tokens(text, tokenizer, count)[:count] == whole[:count]


def test_a_word_cut_at_the_last_token_asked_for_is_read_to_its_end(tokenizer):
    text = " function" * 5000                                               # 9 letters, one token
    whole = tokenizer(text).input_ids
    assert len(whole) == 5000
    for count in range(1020, 1036):                                         # for some, " functi"
        assert gdn.first_tokens(text, tokenizer, count)[:count] == whole[:count]


def test_a_long_text_is_not_tokenised_to_its_end(tokenizer):
    sizes = []

    def counting(text, verbose):
        sizes.append(len(text))
        return tokenizer(text)

    assert len(gdn.first_tokens("some words of a long text " * 100_000, counting, 1000)) >= 1000
    assert sum(sizes) < 100_000


def test_c4_comes_from_the_cache_else_from_the_hub_in_the_order_of_its_shards(
        tmp_path, tokenizer, monkeypatch):
    asked = []

    def download(repo, file, repo_type, local_files_only=False):
        assert (repo, repo_type) == ("allenai/c4", "dataset")
        asked.append((file, local_files_only))
        if local_files_only:
            raise gdn.huggingface_hub.errors.LocalEntryNotFoundError("not here")
        path = tmp_path / Path(file).name
        path.write_bytes(gzip.compress(json.dumps({"text": "word " * 30}).encode()))
        return str(path)

    monkeypatch.setattr(gdn.huggingface_hub, "hf_hub_download", download)
    names = [f"en/c4-validation.0000{i}-of-00008.json.gz" for i in (0, 1)]
    found = gdn.documents("c4", tokenizer, 2, 20)
    assert [name for name, *_ in found] == [f"{name}:1" for name in names]
    assert asked == [(name, local) for name in names for local in (True, False)]
    monkeypatch.setattr(gdn.huggingface_hub, "hf_hub_download", functools.partial(
        lambda *args, local_files_only=False, **kwargs: download(*args, "dataset", True)))
    with pytest.raises(gdn.Error, match="cannot load the file en/c4-validation.00000.*not here"):
        gdn.documents("c4", tokenizer, 1, 20)


def test_the_held_out_files_and_the_training_files_are_disjoint_and_both_plenty():
    held, trained = gdn.stdlib_files(True), gdn.stdlib_files(False)
    assert not set(held) & set(trained) and len(held) > 50 and len(trained) > 200
    assert not any({"test", "site-packages"} & set(path.parts) for path in held + trained)


# ---- result files --------------------------------------------------------------------------------

STAGES = pytest.mark.parametrize("stage", [spectrum, decay, loss, ruler],
                                 ids=lambda stage: stage.__name__)


@pytest.fixture
def start(small, texts, tmp_path, monkeypatch):
    """start(stage, **flags) runs a stage on the small model and returns its result file."""
    monkeypatch.setitem(ruler.NEW_TOKENS, "niah", 4)
    monkeypatch.setitem(ruler.NEW_TOKENS, "vt", 4)

    def start(stage, folder="results", **flags):
        common = {"model": (str(small),), "results": str(tmp_path / folder), "segment": 64}
        if stage is not ruler:
            common["documents"] = texts
        if stage in (loss, ruler):
            common["ranks"] = (8, 2, 0)
        if stage is spectrum:
            common["ranks"] = (8, 2)
        stage.main(**flags_of(stage, **{**common, **flags}))
        files = sorted((tmp_path / folder / "small").glob("**/*.json"), key=os.path.getmtime)
        return files[-1] if files else None

    return start


def items_of(path):
    """The items of a result file, without their times."""
    items = json.loads(path.read_text())["items"]
    assert all(item.pop("seconds")["total"] > 0 for item in items)
    return items


@STAGES
def test_a_killed_run_goes_on_after_what_is_there_to_the_numbers_of_a_whole_one(
        stage, start, monkeypatch, capsys):
    more = {"samples": 5} if stage is ruler else {"docs": 5}
    whole = items_of(start(stage, "whole", **more))
    assert len(whole) == 5
    measure, calls = stage.measure, []

    def killed(*args):
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return measure(*args)

    monkeypatch.setattr(stage, "measure", killed)
    with pytest.raises(KeyboardInterrupt):
        start(stage)
    path = start(stage)
    assert items_of(path) == whole[:3] and len(calls) == 4
    assert items_of(start(stage, **more)) == whole and len(calls) == 6      # none measured twice
    monkeypatch.setattr(gdn, "load_model", lambda run: pytest.fail("it was loaded again"))
    before = path.read_bytes()
    start(stage, **more)
    assert "is complete" in capsys.readouterr().err
    start(stage)                                                            # fewer is there, too
    assert path.read_bytes() == before


@pytest.mark.parametrize("stage, keys", [(loss, ("loss", "kl", "agree")),
                                         (ruler, ("outputs", "scores", "references"))])
@pytest.mark.parametrize("keep", ["top", "random"])
def test_ranks_give_the_same_numbers_whichever_run_beside_them(stage, keys, keep, start):
    single = items_of(start(stage, "single", rows=1, keep=keep))
    together = items_of(start(stage, "together", keep=keep))
    for item, other in zip(single, together):
        for key in keys:
            assert item[key] == (pytest.approx(other[key], abs=1e-5) if stage is loss
                                 else other[key])


CHANGES = [("arguments", "segment", 65), ("arguments", "ranks", [3]), ("heads_cut", None, [1, 8]),
           ("arguments", "documents", "c4"), ("environment", "weights", "0123abcd"),
           ("environment", "device", "cuda (X)"), ("environment", "dtype", "bfloat16"),
           ("environment", "transformers", "4.0"), ("environment", "torch", "1.0")]


@pytest.mark.parametrize("part, key, value", CHANGES)
def test_a_result_made_with_something_else_is_refused_with_its_name_and_left_as_it_is(
        part, key, value, start):
    path = start(loss, docs=1)
    record = json.loads(path.read_text())
    if key:
        record[part][key] = value
    else:
        record[part] = value
    path.write_text(json.dumps(record))
    before = path.read_bytes()
    with pytest.raises(gdn.Error, match=key or part):
        start(loss, docs=2)
    assert path.read_bytes() == before


def test_another_document_damage_nan_and_another_runs_change_are_refused(start, monkeypatch):
    path = start(loss, docs=1)
    before = path.read_bytes()
    record = json.loads(before)
    record["items"][0]["sha256"] = "0" * 64
    path.write_text(json.dumps(record))
    with pytest.raises(gdn.Error, match="holds another document than texts.jsonl:1"):
        start(loss, docs=2)
    path.write_bytes(before[:300])
    with pytest.raises(gdn.Error, match="is no result file"):
        start(loss, docs=2)
    path.write_bytes(before)
    measure = loss.measure
    monkeypatch.setattr(loss, "measure", lambda *args: measure(*args) * torch.nan)
    with pytest.raises(gdn.Error, match="NaN or infinite"):
        start(loss, docs=2)
    assert path.read_bytes() == before

    def meanwhile(*args):
        path.write_text(json.dumps({**json.loads(before), "items": []}))
        return measure(*args)

    monkeypatch.setattr(loss, "measure", meanwhile)
    with pytest.raises(gdn.Error, match="changed by another run"):
        start(loss, docs=2)
    assert json.loads(path.read_text())["items"] == []
    assert [file.name for file in path.parent.iterdir()] == [path.name]     # nothing temporary


def test_variants_stand_side_by_side_in_the_documented_names_and_keys(start, monkeypatch):
    decay_path = start(decay, segment=64)
    assert decay_path.name == "02_decay.json"                               # 02 has no variants
    record = json.loads(start(loss, heads="upto-99999", keep="random").read_text())
    assert record["script"] == "03_loss" and record["state"] == [16, 16]
    assert record["layers"] == [0, 1] and record["heads_cut"] == [8, 8]
    assert set(record["environment"]) == {"torch", "transformers", "device", "dtype", "weights"}
    assert record["after_bins"] == [0, 1, 4, 16, 64] and sum(record["after_counts"]) == 149
    start(loss, segment=64, docs=1)
    start(spectrum, docs=1)
    start(ruler, samples=1)
    start(ruler, keep="bottom", samples=1)
    folder = decay_path.parent
    assert sorted(str(path.relative_to(folder)) for path in folder.glob("**/*.json")) == [
        "01_spectrum.segment=64.json", "02_decay.json",
        "03_loss.heads=upto-99999.keep=random.segment=64.json", "03_loss.segment=64.json",
        "04_ruler/niah_single_1_150.keep=bottom.segment=64.json",
        "04_ruler/niah_single_1_150.segment=64.json"]


def test_a_control_and_a_choice_of_heads_change_the_numbers(start):
    start(decay, segment=256)
    full = items_of(start(loss))[0]["loss"]
    for other in ({"keep": "bottom"}, {"keep": "random"}, {"heads": "over-3"}):
        loss_ = items_of(start(loss, **other))[0]["loss"]
        assert loss_["full"] == full["full"] and abs(loss_["8"] - full["8"]) > 1e-6


def test_the_chosen_heads_have_the_horizon_of_the_mean_log_decay(tmp_path):
    run = SimpleNamespace(output=tmp_path, layers=[0, 2], heads=2, model="a/b")
    assert gdn.chosen_heads(run, "all").tolist() == [[True, True], [True, True]]
    with pytest.raises(gdn.Error, match="run 02_decay.py first"):
        gdn.chosen_heads(run, "over-4")
    items = [{"log_a": [[-1.0, -0.125], [-0.5, 0.0]]}, {"log_a": [[-0.5, -0.125], [-0.5, 0.0]]}]
    (tmp_path / "02_decay.json").write_text(json.dumps(
        {"script": "", "items": items, "arguments": {}, "environment": {"weights": ""}}))
    assert gdn.chosen_heads(run, "over-2").tolist() == [[False, True], [False, True]]
    assert gdn.chosen_heads(run, "upto-2").tolist() == [[True, False], [True, False]]
    assert gdn.chosen_heads(run, "over-8").tolist() == [[False, False], [False, True]]
    with pytest.raises(gdn.Error, match="upto-1 is no head .* 1 to inf"):
        gdn.chosen_heads(run, "upto-1")


def test_all_models_are_checked_before_the_first_one_runs(start, small, tmp_path, monkeypatch):
    monkeypatch.setattr(gdn, "load_model", lambda run: pytest.fail("it ran"))
    twin = tmp_path / "models--Qwen--Qwen3.5-0.8B" / "snapshots" / "abc"
    shutil.copytree(small, twin)
    shutil.copytree(small, tmp_path / "small")
    with pytest.raises(gdn.Error, match="no folder"):
        start(loss, model=(str(small), "no/such/folder"))
    with pytest.raises(gdn.Error, match="both go to"):
        start(loss, model=(str(small), str(tmp_path / "small")))
    with pytest.raises(gdn.Error, match="beyond the 16 modes"):
        start(loss, model=(str(small), str(twin)), ranks=(17,))
    arguments = {"model": (str(small), str(twin)), "device": "cpu", "dtype": "auto",
                 "results": str(tmp_path / "results")}
    runs = gdn.plan("03_loss", arguments)
    assert [run.model for run in runs] == [str(small), "Qwen/Qwen3.5-0.8B"]
    assert runs[1].output == tmp_path / "results" / "Qwen3.5-0.8B"


def test_a_mean_and_its_standard_error_have_ddof_1_and_are_shown_to_its_digits():
    assert gdn.mean_se([1.0, 2.0, 6.0]) == (3.0, pytest.approx((7 / 3) ** 0.5))
    assert gdn.mean_se([4.0]) == (4.0, None)
    for values, shown in {(1.0, 2.0, 6.0): "+3.0 ± 1.5", (0.005, 0.006): "+0.00550 ± 0.00050",
                          (-10.0, -35.0): "-22 ± 12", (0.0, 0.0): "+0 (none of 2)",
                          (5.0,): "+5 (all of 1)"}.items():
        assert gdn.with_error(values) == shown


# ---- 04: the samples -----------------------------------------------------------------------------

@pytest.mark.parametrize("task", ruler.TASKS)
def test_samples_fill_the_length_never_exceed_it_and_hide_each_answer_once(task, tokenizer):
    places = set()
    for length, count in ((512, 10), (1024, 3), (2048, 2), (4096, 1)):
        for index in range(count):
            sample = ruler.make_sample(task, length, index, 0, tokenizer)
            prompt, references = sample["prompt"], sample["references"]
            assert sample["ids"] == tokenizer(prompt).input_ids
            tokens = len(sample["ids"]) + ruler.NEW_TOKENS[ruler.family(task)]
            wide = task == "niah_multikey_3" and length <= 2048             # long needles
            assert (0.7 if wide else 0.95) * length <= tokens <= length
            assert not prompt.endswith(" ")
            context = prompt[:prompt.rindex("\n")]
            if length >= 2048 and task in ("vt", "cwe"):
                example, context = context.split("\n\n")
                assert not any(re.search(rf"\b{word}\b", example) for word in references)
            CHECKS[ruler.family(task)](task, context, prompt, references, length)
            places.add(context.index(references[0]) * 4 // len(context))
            assert not any(a != b and a in b for a in references for b in references)
    if task not in ("cwe", "fwe"):                                          # there it is all over
        assert len(places) > 1


def check_niah(task, context, prompt, references, length):
    needles = re.findall(r"The code of (\S+) is (\S+)\.", context)
    asked, = re.findall(r" The codes? of (.*) (?:is|are)$", prompt)
    asked = asked.replace(" and ", ", ").split(", ")
    assert len(asked) == (4 if task == "niah_multiquery" else 1)
    assert sorted(value for name, value in needles if name in asked) == sorted(references)
    assert len({value for _, value in needles}) == len(needles)
    names = len({name for name, _ in needles})
    if task in ("niah_multikey_2", "niah_multikey_3"):
        assert names == len(needles) >= 2
        assert re.sub(r"The code of \S+ is \S+\.\s?", "", context).count(" ") == 7      # no prose
    else:
        four = {"niah_multikey_1": (4, 4), "niah_multiquery": (4, 4), "niah_multivalue": (4, 1)}
        assert (len(needles), names) == four.get(task, (1, 1))
        assert ("The river is wide." in context) == (task == "niah_single_1")
    shape = {"niah_single_3": "[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}"}
    shape["niah_multikey_3"] = shape["niah_single_3"]
    for value in references:
        assert context.count(value) == 1 and re.fullmatch(shape.get(task, r"\d{7}"), value)


def check_vt(task, context, prompt, references, length):
    value = re.findall(r"Which variables hold (\d{5})\?", prompt)[-1]
    assert re.findall(r"VAR ([A-Z]{5}) = ", context) == references and len(references) == 5
    assert re.findall(r" = (?:VAR )?(\w+)\.", context) == [value, *references[:-1]]
    for name in references:                         # nowhere but in its own and the next assignment
        assert context.upper().count(name) == (1 if name == references[-1] else 2)


def check_cwe(task, context, prompt, references, length):
    words = re.findall(r"^\d+ (\S+)$", context, re.MULTILINE)
    counts = {word: words.count(word) for word in set(words)}
    common, rare = (6, 1) if length < 4096 else (30, 3)
    assert len(references) == 10 and all(counts[word] == common for word in references)
    assert all(n == rare for word, n in counts.items() if word not in references)
    assert not any(asked in word for asked in references for word in counts if word != asked)
    numbers = re.findall(r"^(\d+) ", context, re.MULTILINE)
    assert list(map(int, numbers)) == list(range(1, len(words) + 1))


def check_fwe(task, context, prompt, references, length):
    words = context.split("\n")[1].split()
    counts = sorted(((words.count(word), word) for word in set(words)), reverse=True)
    assert [word for _, word in counts[:4]] == ["...", *references]
    assert len(counts) <= max(length // 50, 4)
    assert counts[1][0] > counts[2][0] > counts[3][0] > (counts[4][0] if len(counts) > 4 else 0)
    total = sum(n for n, _ in counts)
    assert counts[0][0] / total == pytest.approx(0.63, abs=0.06)            # 1 / zeta(2), rounded
    assert all(re.fullmatch("[a-z]{6}", word) for _, word in counts[1:])


CHECKS = {"niah": check_niah, "vt": check_vt, "cwe": check_cwe, "fwe": check_fwe}


@pytest.mark.parametrize("task", ruler.TASKS)
def test_the_sample_is_the_largest_a_plain_search_finds_in_a_few_guesses(
        task, tokenizer, monkeypatch):
    sized_sample, calls = ruler.sized_sample, []

    def counted(*args):
        calls.append(args)
        return sized_sample(*args)

    monkeypatch.setattr(ruler, "sized_sample", counted)
    ruler.make_sample(task, 16384, 0, 0, tokenizer)
    assert len(calls) <= 8
    for length, index in ((300, 0), (700, 1), (5000, 2)):
        def fits(size):
            sample = sized_sample(task, length, index, 7, tokenizer, size)
            return len(sample["ids"]) + ruler.NEW_TOKENS[ruler.family(task)] <= length
        low = ruler.SMALLEST[ruler.family(task)]
        while fits(2 * low):
            low *= 2
        high = 2 * low
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if fits(middle) else (low, middle)
        sample = ruler.make_sample(task, length, index, 7, tokenizer)
        assert sample == sized_sample(task, length, index, 7, tokenizer, low)
    prompts = {ruler.make_sample(task, 600, i, seed, tokenizer)["prompt"]
               for i in (0, 1) for seed in (0, 1)}
    assert len(prompts) == 4                                                # all of them others


def test_needles_and_assignments_keep_their_order_even_in_a_haystack_of_four_sentences():
    for seed in range(300):
        context, [(_, _, names)] = ruler.vt(4, Random(seed))
        assert re.findall(r"VAR ([A-Z]{5}) = ", context) == names


def test_common_words_beyond_the_list_are_filled_with_pairs():
    context, [(_, _, asked)] = ruler.cwe(9000, Random(0))
    words = re.findall(r"^\d+ (\S+)$", context, re.MULTILINE)
    assert len(set(words)) == 9010 and len(words) == 27300 and any("-" in word for word in words)
    assert not any(word in other for word in asked for other in set(words) - {word})


def test_the_score_is_the_share_of_references_found_whatever_their_case():
    assert ruler.score("vt", "they are abcde FGHIJ.", ["ABCDE", "FGHIJ", "KLMNO", "PQRST"]) == 50
    assert ruler.score("niah_single_1", "1234567", ["1234567"]) == 100
    assert ruler.score("cwe", "", ["a", "b"]) == 0
    assert ruler.score("cwe", "artist", ["art", "artist"]) == 100           # as in RULER
    assert ruler.score("qa_1", "in Paris", ["paris", "the city of Paris"]) == 100   # any wording
    assert ruler.score("cwe", "in Paris", ["paris", "rome"]) == 50


def test_a_length_too_short_for_a_task_is_told_with_one_that_works(start, tokenizer, monkeypatch):
    monkeypatch.setattr(gdn, "load_model", lambda run: pytest.fail("it was loaded"))
    for task in ruler.TASKS:
        with pytest.raises(gdn.Error, match=f"too short for {task}: .* works") as error:
            start(ruler, tasks=(task,), lengths=(20,), segment=8)
        works = int(re.search(r"(\d+) works", str(error.value))[1])
        for index in range(3):
            sample = ruler.make_sample(task, works, index, 0, tokenizer)
            assert len(sample["ids"]) + ruler.NEW_TOKENS[ruler.family(task)] <= works
    with pytest.raises(gdn.Error, match="no prompt beyond the first boundary"):
        start(ruler, lengths=(150,), segment=146)


# ---- 04: generation ------------------------------------------------------------------------------

def run_of(net, segment, stop=(), keep="top", mask=None):
    return SimpleNamespace(segment=segment, layers=LAYERS, keep=keep, mask=mask, stop=set(stop))


def generate(net, ids, group, new_tokens, **run):
    return ruler.generate(net, run_of(net, **run), ids, group, new_tokens, {"truncate": 0}, NOBAR)


@pytest.mark.parametrize("segment, group", [(60, [None]), (50, [None, 2]), (7, [None, 1, 2])])
def test_row_0_generates_what_transformers_generates_token_for_token(net, segment, group):
    ids = ids_of(61)
    want = net.generate(ids, do_sample=False, max_new_tokens=25, eos_token_id=-1)[0, 61:].tolist()
    answers = generate(net, ids, group, 25, segment=segment)
    assert answers[0] == want and [len(answer) for answer in answers] == [25] * len(group)


def test_a_row_ends_at_its_own_end_of_text_token_and_the_others_go_on():
    net, ids = random_model(), ids_of(61)
    whole = generate(net, ids, [None, 3, 0], 25, segment=32)
    stop = whole[0][4]
    cut = [answer[:answer.index(stop)] if stop in answer else answer for answer in whole]
    assert generate(net, ids, [None, 3, 0], 25, segment=32, stop=[stop]) == cut
    assert len(cut[0]) < 5 and max(map(len, cut)) > len(cut[0])


@pytest.mark.parametrize("keep", ["top", "bottom"])
def test_boundaries_in_prompt_and_answer_truncate_as_a_plain_loop_does(net, keep):
    ids, mask = ids_of(60), torch.ones(2, net.config.linear_num_value_heads, dtype=torch.bool)
    mask[1, 0] = False
    got = generate(net, ids, [None, 3, 0], 12, segment=32, keep=keep, mask=mask)
    for row, rank in ((1, 3), (2, 0)):
        tokens = ids[0].tolist()
        while len(tokens) < 72:
            logits, _ = plain_run(net, torch.tensor([tokens]), 32, rank, keep, mask)
            tokens.append(logits[-1].argmax().item())
        assert got[row] == tokens[60:]
    assert got[0] != got[1] != got[2]


# ---- 04: prompts of RULER's own files ------------------------------------------------------------

def write_data(file, task, tokenizer, length=200, **changes):
    """Two samples as RULER's generator writes them; a change of None leaves a field out."""
    file.parent.mkdir(parents=True, exist_ok=True)
    lines = []
    for index in range(2):
        sample = ruler.make_sample(task, length, index, 3, tokenizer)
        at = sample["prompt"].rindex(" The ")
        row = {"index": index, "input": sample["prompt"][:at], "outputs": sample["references"],
               "answer_prefix": sample["prompt"][at:], "length": length, **changes}
        lines.append(json.dumps({key: value for key, value in row.items() if value is not None}))
    file.write_text("\n".join(lines) + "\n\n")
    return str(file)


@pytest.fixture
def answered(monkeypatch, tokenizer):
    """The prompts that are run; each is answered in every row with its last code."""
    prompts = []

    def answer(net, run, ids, group, new_tokens, seconds, bar):
        assert run.stop == {tokenizer.eos_token_id, 5, 9}
        prompts.append((tokenizer.decode(ids[0]), new_tokens))
        code = re.findall(r"\d{5,7}", prompts[-1][0])[0]
        return [tokenizer(f" it is {code}").input_ids] * len(group)

    monkeypatch.setattr(ruler, "generate", answer)
    return prompts


def test_rulers_own_tree_runs_as_it_is_length_by_length(start, tokenizer, tmp_path, answered):
    tree = tmp_path / "tree"
    for length in (200, 300):
        for task in ("niah_single_2", "vt"):
            file = tree / str(length) / "data" / task / "validation.jsonl"
            write_data(file, task, tokenizer, length)
    path = start(ruler, data=str(tree), tasks=ruler.DEFAULT_TASKS, lengths=(), samples=25)
    names = {f"{task}_{length}.segment=64.data=ruler.json"
             for task in ("niah_single_2", "vt") for length in (200, 300)}
    assert {file.name for file in path.parent.iterdir()} == names
    made = [ruler.make_sample(task, length, i, 3, tokenizer) for length in (200, 300)
            for task in ("niah_single_2", "vt") for i in range(2)]
    assert answered == [(sample["prompt"], 4) for sample in made]
    record = json.loads((path.parent / "niah_single_2_200.segment=64.data=ruler.json").read_text())
    assert record["arguments"]["length"] == 200 and record["heads_cut"] == [8, 8]
    for item, sample in zip(record["items"], made):
        assert item["references"] == sample["references"]
        assert list(item["outputs"]) == list(item["scores"]) == ["full", "8", "2", "0"]
        assert item["outputs"]["2"] == f" it is {sample['references'][0]}"
        assert item["scores"]["0"] == 100
    record = json.loads((path.parent / "vt_300.segment=64.data=ruler.json").read_text())
    assert [item["scores"]["full"] for item in record["items"]] == [0, 0]
    answered.clear()
    start(ruler, "one", data=str(tree), tasks=("vt",), lengths=(300,), samples=1)
    assert answered == [(made[6]["prompt"], 4)]
    with pytest.raises(gdn.Error, match="none of --tasks vt at these --lengths"):
        start(ruler, data=str(tree), tasks=("vt",), lengths=(512,))


def test_a_file_names_its_task_and_length_by_flags_where_it_lacks_them(
        start, tokenizer, tmp_path, answered):
    whole = ruler.make_sample("vt", 200, 0, 3, tokenizer)["prompt"]
    old = write_data(tmp_path / "vt" / "validation.jsonl", "vt", tokenizer, length=200,
                     input=whole, answer_prefix=None)                       # as before 2025
    path = start(ruler, data=old, tasks=ruler.DEFAULT_TASKS, lengths=(), samples=1)
    assert path.name == "vt_200.segment=64.data=ruler.json" and answered == [(whole, 4)]
    bare = tmp_path / "my.jsonl"
    bare.write_text(json.dumps({"input": whole, "outputs": ["x"]}))         # no length
    with pytest.raises(gdn.Error, match="--tasks"):
        start(ruler, "bare", data=str(bare), tasks=("vt", "cwe"))
    with pytest.raises(gdn.Error, match="name it with --lengths"):
        start(ruler, "bare", data=str(bare), tasks=("vt",), lengths=())
    assert start(ruler, "bare", data=str(bare), tasks=("vt",), lengths=(210,)).name[:6] == "vt_210"
    for wrong in (150, 500):                                                # too small, too large
        with pytest.raises(gdn.Error, match=f"were not made for {wrong}"):
            start(ruler, "bare", data=str(bare), tasks=("vt",), lengths=(wrong,))
    with pytest.raises(gdn.Error, match="crosses no boundary of --segment 250"):
        start(ruler, "bare", data=str(bare), tasks=("vt",), lengths=(210,), segment=250)
    with pytest.raises(gdn.Error, match="cwe"):                             # a folder has its name
        start(ruler, "bare", data=str(tmp_path / "vt"), tasks=("cwe",), lengths=())


@pytest.mark.parametrize("line", [
    "{", '"text"', "[" * 100_000, '{"outputs": ["b"]}', '{"input": "a"}',
    '{"input": "", "outputs": ["b"]}', '{"input": "a", "outputs": [""]}',
    '{"input": "a", "outputs": "b"}', '{"input": "a", "outputs": []}',
    '{"input": "a", "outputs": ["b"], "length": Infinity}', '{"input": 5, "outputs": ["b"]}'])
def test_a_bad_line_of_a_ruler_file_is_named_before_the_model_is_opened(
        tmp_path, start, tokenizer, monkeypatch, line):
    monkeypatch.setattr(gdn, "plan", lambda *_: pytest.fail("the model was opened"))
    write_data(tmp_path / "vt.jsonl", "vt", tokenizer)
    (tmp_path / "vt.jsonl").write_text((tmp_path / "vt.jsonl").read_text().strip() + "\n" + line)
    with pytest.raises(gdn.Error, match="vt.jsonl, line 3"):
        start(ruler, data=str(tmp_path / "vt.jsonl"), tasks=("vt",))
    with pytest.raises(gdn.Error, match="no such file"):
        start(ruler, data=str(tmp_path / "nothing"))


# ---- the command line ----------------------------------------------------------------------------

@pytest.fixture
def typed(monkeypatch, capsys):
    """typed(stage, *words): what its main is called with, or the exit code; and what it says."""
    def run(stage, *words):
        given = []
        stand_in = functools.wraps(stage.main)(lambda **flags: given.append(flags))
        monkeypatch.setattr(sys, "argv", [f"{stage.__name__}.py", *words])
        try:
            gdn.command(stand_in)
        except SystemExit as end:
            given.append(end.code)
        return given, "".join(capsys.readouterr())
    return run


def test_flags_arrive_as_they_were_typed_and_in_their_own_types(typed):
    assert typed(loss, "--results", "2024_05", "--documents", "data#v2", "--ranks=48, 12,048",
                 "--docs", "08", "--model", "tiny")[0] == [
        {"results": "2024_05", "documents": "data#v2", "ranks": (48, 12, 48), "docs": 8,
         "model": gdn.BUNDLED}]
    assert typed(loss, "--results", "1e3", "--model", "a/b,./c", "--heads", "over-256")[0] == [
        {"results": "1e3", "model": ("a/b", "./c"), "heads": "over-256"}]
    assert typed(ruler, "--seed=0", "--tasks", "vt, cwe", "--lengths=512")[0] == [
        {"seed": 0, "tasks": ("vt", "cwe"), "lengths": (512,)}]
    assert typed(decay)[0] == [{}]


MISTAKES = {"--modle tiny": "modle", "stray": "stray", "--docs 3 stray": "stray",
            "--model": "--model needs a value", "--nodocs": "--docs needs a value",
            "--ranks=": "--ranks needs a value", "--docs 0": "--docs takes a whole number from 1",
            "--docs -5": "--docs takes", "--docs=2.5": "--docs takes", "--rows 0": "--rows takes",
            "--ranks 8,x": "--ranks takes", "--ranks 1.5": "--ranks takes",
            "--keep best": "--keep takes top, bottom or random", "--heads over": "--heads takes",
            "--segment 1_0": "--segment takes", "--model a,,b": "--model takes",
            "--dtype int8": "--dtype takes"}


@pytest.mark.parametrize("words", MISTAKES)
def test_a_mistake_on_the_command_line_is_told_in_a_sentence_and_nothing_runs(typed, words):
    (code,), text = typed(loss, *words.split())
    assert code not in (0, None) and not isinstance(code, dict)             # main was not called
    assert MISTAKES[words] in f"{text}{code}" and "Traceback" not in text


@pytest.mark.parametrize("stage, words", [
    (spectrum, dict(tokens=512)), (spectrum, dict(ranks=(2, 0))), (loss, dict(tokens=257)),
    (loss, dict(ranks=(17,))), (loss, dict(heads="over-9")), (ruler, dict(tasks=("vtt",))),
    (decay, dict(device="cuda:99")), (decay, dict(documents="no/such"))])
def test_what_cannot_be_measured_is_an_error_before_weights_are_loaded(
        stage, words, start, monkeypatch):
    monkeypatch.setattr(gdn, "load_model", lambda run: pytest.fail("the model was loaded"))
    with pytest.raises(gdn.Error):
        start(stage, **{"segment": 256, "tokens": 600, **words} if stage is not ruler else words)


@pytest.mark.parametrize("failure, says", [
    (gdn.Error("a sentence"), "error: a sentence"), (KeyboardInterrupt(), "stopped; .* goes on"),
    (torch.OutOfMemoryError("CUDA out of memory. Tried"), "out of memory: try fewer --rows"),
    (MemoryError(), "out of memory"), (RuntimeError("DefaultCPUAllocator: can't allocate memory"),
                                       "out of memory")])
def test_errors_end_in_a_sentence_and_other_failures_are_not_hidden(failure, says, monkeypatch):
    def main():
        raise failure

    monkeypatch.setattr(sys, "argv", ["x.py"])
    with pytest.raises(SystemExit, match=says):
        gdn.command(main)
    failure = RuntimeError("a fault of ours")
    with pytest.raises(RuntimeError, match="a fault of ours"):
        gdn.command(main)


FAKE = 'def __getattr__(name): raise RuntimeError("a fast kernel was used on a CPU")\n'


def test_the_scripts_run_as_programs(tmp_path):
    """Two at once: as each imports transformers, they are much of what these tests cost."""
    for package in ("fla", "causal_conv1d"):                                # installed, but no GPU
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").write_text(FAKE)
        info = tmp_path / f"{package}-9.9.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 9.9\n")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "PYTHONIOENCODING": "ascii",
                   "OMP_NUM_THREADS": "1"}

    def run(*words):
        return subprocess.Popen([sys.executable, *words], text=True, stdout=subprocess.PIPE,
                                stderr=subprocess.PIPE, env=environment, cwd=tmp_path)

    whole = run(HERE / "03_loss.py", "--docs", "2", "--tokens", "300", "--ranks", "48,12",
                "--model", "tiny/recurrent")
    shown = run(HERE / "04_ruler.py", "--help")
    (out, err), help_ = whole.communicate(timeout=100), shown.communicate(timeout=100)
    assert whole.returncode == 0, err
    assert "3 GDN layers x 4 heads, states 64 x 64, float32 on cpu, reference kernels" in err
    assert out.strip().endswith("recurrent/03_loss.json") and "? " in out   # a ± in ASCII
    assert len(items_of(tmp_path / "results" / "recurrent" / "03_loss.json")) == 2
    assert shown.returncode == 0
    text = "".join(help_)
    for line in ("--model=MODEL", "--lengths=LENGTHS", "models with commas", "Default: 256",
                 "Default: 'top'", "top, bottom or random", "tokens between boundaries"):
        assert line in text
    assert "FIRE_METADATA" not in text and "INFO" not in text


# ---- the report, from result files written by hand ----------------------------------------------

def write_result(root, model, file, script_name, items, arguments=None, **more):
    """A result file of a model of 2 GDN layers x 2 heads with 8 x 8 states."""
    record = {"script": script_name, "model": model, "layers": [0, 1], "state": [8, 8],
              "shape": {"layers": 3, "hidden": 16, "heads": 2},
              "arguments": {"documents": "c4", "docs": 8, "tokens": 16384, "segment": 256,
                            "ranks": [48, 12, 0], "keep": "top", "heads": "all", "seed": 0,
                            "data": None, **(arguments or {})},
              "environment": {"torch": "2", "transformers": "5", "device": "cpu",
                              "dtype": "float32", "weights": "0"}, "heads_cut": [4, 4], **more}
    record["items"] = [{"seconds": {"total": 2.0, "truncate": 0.5}, **item} for item in items]
    path = root / Path(model).name / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record))
    return record


HEADS = [[1.0, 2.0], [3.0, 4.0]]


def spectrum_items():
    by_rank = {"48": HEADS, "12": [[0.9, 0.8], [0.7, 0.6]], "0": HEADS}
    item = {"positions": [256, 512], "effective_rank": [HEADS, [[3.0, 4.0], [5.0, 6.0]]],
            "spectrum": [[[0.7, 0.3]] * 2] * 2, "energy": by_rank, "overlap": by_rank,
            "readout": {**by_rank, "12": [[0.5, 0.4], [0.3, 0.2]]}}
    return [item, {**item, "overlap_other": by_rank}]


def loss_items():
    found = []
    for full, at_12, at_0 in ((2.0, 2.1, 3.0), (3.0, 3.3, 4.0)):
        found.append({"loss": {"full": full, "48": full, "12": at_12, "0": at_0},
                      "kl": {"48": 0.0, "12": 0.02, "0": 0.5},
                      "agree": {"48": 1.0, "12": 0.75, "0": 0.5},
                      "after": {"full": [full, 1.0], "48": [full, 1.0], "12": [full, 1.5],
                                "0": [full, 3.0]}})
    return found


def task_items(changes):
    return [{"references": ["a"], "outputs": {}, "scores": {
        "full": 50.0, "48": 50.0, "12": 50.0 + change, "0": 0.0}} for change in changes]


def write_model(root, model="a/model"):
    write_result(root, model, "01_spectrum.json", "01_spectrum", spectrum_items())
    log_a = [[-1 / 5000, -1 / 100], [-1 / 256, -1.0]]
    items = [{"log_a": log_a, "write_strength": HEADS}] * 2
    write_result(root, model, "02_decay.json", "02_decay", items)
    write_result(root, model, "03_loss.json", "03_loss", loss_items(), after_bins=[0, 256],
                 after_counts=[256, 10])
    for length, changes in ((4096, [0, 0, 0]), (65536, [50, -50, -50, 0])):
        write_result(root, model, f"04_ruler/vt_{length}.json", "04_ruler", task_items(changes),
                     {"task": "vt", "length": length})


@pytest.fixture
def undrawn(monkeypatch):
    """Leaves the figures out, which take most of a report's time."""
    monkeypatch.setattr(report, "draw", lambda root, name, panel, groups: f"[{name}: {[*groups]}]")


def reported(root, **flags):
    report.main(results=str(root), **flags)
    return (root / "report.md").read_text()


def test_the_report_computes_known_answers_from_the_items(tmp_path, undrawn):
    write_model(tmp_path)
    text = reported(tmp_path)
    assert "| heads with a decay horizon over 4,096 tokens | 48 of 288 | 1 of 4 |" in text
    assert "horizon at most 256 | 61% | 75% |" in text
    assert "over 4,096 | 30 to 47 | 2 to 2 (heads: 1) |" in text        # the first: (1 + 3) / 2
    assert "| change in loss, 12 modes kept | +0.005 nats | +0.20 ± 0.10 nats |" in text
    assert "| 12 | +0.20 ± 0.10 (20% of rank 0) | 0.02 (all of 2) | 75.0% |" in text
    assert "| 0 | +1 (all of 2) | 0.5 (all of 2) | 50.0% |" in text
    assert "| full | 2.5000 nats |" in text
    long = "vt | 65,536 | all heads, top modes | 4 | 50.0 | +0 (none of 4) | -12 ± 24, 1 up 2 down"
    short = "vt | 4,096 | all heads, top modes | 3 | 50.0 | +0 (none of 3) | +0 (none of 3) |"
    assert long in text and short in text
    assert "65,536 tokens: full state 50, rank 12 -12 ± 24" in text      # the post's length alone
    heads = "model | 2.0, 3.5, 5.0 of 8 | 12 | 3.5 (all of 2) | 0.75 (all of 2) | 0.35 (all of 2) |"
    assert heads in text
    assert "4 s, of these 1 at boundaries" in text
    assert text.index("**model**: with 12 of 8") < text.index("## The post's claims")
    assert text.index("## The post's claims") < text.index("## Next-token") < text.index("## Runs")


def drawn(panel, records):
    """What a panel draws: the points of its curves with error bars, or else of its lines."""
    figure, ax = report.plt.subplots()
    panel(ax, records)
    lines = [container.lines[0] for container in ax.containers] or ax.lines
    report.plt.close(figure)
    return ax, [[pytest.approx(point) for point in line.get_xydata().tolist()] for line in lines]


def test_the_panels_draw_what_the_items_hold(tmp_path):
    write_model(tmp_path)
    records, _ = report.read_model(tmp_path / "model")
    ax, [[*loss_line]] = drawn(report.loss_panel, records)
    assert [point.expected[1] for point in loss_line] == pytest.approx([0, 0.2, 1])
    assert [label.get_text() for label in ax.get_xticklabels()] == ["48", "12", "0"]
    assert [label.get_text() for label in ax.child_axes[0].get_xticklabels()] == ["12", "3", "0"]
    _, [kl_line] = drawn(report.kl_panel, records)
    assert [point.expected[1] for point in kl_line] == pytest.approx([0, 0.02, 0.5])
    _, after = drawn(report.after_panel, records)
    assert after == [[[0, 0], [1, 0]], [[0, 0], [1, 0.5]], [[0, 0], [1, 2]]]    # ranks 48, 12, 0
    _, horizon = drawn(report.horizon_panel, records)
    assert horizon[:2] == [[[5000, 2], [100, 3]], [[256, 4], [1, 5]]]
    _, readout = drawn(report.readout_panel, records)
    assert readout[:2] == [[[0.1, 0.5], [0.2, 0.6]], [[0.3, 0.7], [0.4, 0.8]]]
    _, along = drawn(report.along_panel, records)
    assert along == [[[256, 1], [512, 3]], [[256, 3], [512, 5]]]            # long and short heads
    _, spectra = drawn(report.spectra_panel, records)
    assert spectra[0] == [[1, 0.7], [2, 0.3]]
    _, lengths = drawn(report.lengths_panel, report.find(records, "04_ruler")[::-1])
    assert lengths[0] == [[4096, 50], [65536, 50]] and lengths[2] == [[4096, 50], [65536, 37.5]]
    _, [tasks_line] = drawn(report.tasks_panel, report.find(records, "04_ruler", length=65536))
    assert [point.expected[1] for point in tasks_line] == pytest.approx([0, -12.5, -50])


def test_a_file_that_cannot_be_read_or_has_not_run_is_named_and_the_rest_reported(
        tmp_path, undrawn):
    write_model(tmp_path)
    (tmp_path / "model" / "03_loss.json").write_text('{"script": "03_loss"')
    (tmp_path / "model" / "02_decay.json").unlink()
    text = reported(tmp_path)
    assert "03_loss.json is no result file" in text and "02_decay has not run on model" in text
    assert "| full state 27; -18 points | not run |" in text
    assert "vt | 65,536" in text and "[readout: ['model']]" in text and "[loss: []]" in text
    with pytest.raises(gdn.Error, match="no result file"):
        report.main(results=str(tmp_path / "nothing"))


def test_variants_are_named_side_by_side_and_claims_rest_on_the_default_alone(tmp_path, undrawn):
    write_model(tmp_path)
    other = [{**item, "loss": {**item["loss"], "12": 9.0}} for item in loss_items()]
    write_result(tmp_path, "a/model", "03_loss.heads=over-256.json", "03_loss", other,
                 {"heads": "over-256"}, after_bins=[0, 256], heads_cut=[1, 4])
    write_result(tmp_path, "a/model", "04_ruler/vt_65536.data=ruler.json", "04_ruler",
                 task_items([-50] * 50), {"task": "vt", "length": 65536, "data": "x"})
    write_result(tmp_path, "a/model", "04_ruler/vt_65536.keep=random.json", "04_ruler",
                 task_items([9] * 50), {"task": "vt", "length": 65536, "keep": "random"})
    text = reported(tmp_path)
    assert "all heads, top modes: change in loss, nats" in text
    assert "heads over-256 (1 of 4): change in loss, nats" in text
    assert "| +0.005 nats | +0.20 ± 0.10 nats |" in text
    assert "vt | 65,536 | RULER's prompts | 50 |" in text and "| random modes | 50 |" in text
    claim = next(line for line in text.splitlines() if "variable tracking" in line)
    assert "rank 12 -12 ± 24" in claim and "rank 12 -50 (all of 50)" in claim and "+9" not in claim
    titles = report.by_variant({"model": report.read_model(tmp_path / "model")[0]})
    assert {title.partition("\n")[2] for title in titles} == {"", "RULER's prompts", "random modes"}
    assert list(report.by_task({"m": report.read_model(tmp_path / "model")[0]})) == ["m, vt"]


def test_any_name_can_be_drawn_and_only_the_models_asked_for_are_reported(tmp_path, monkeypatch):
    write_model(tmp_path, "a/model")
    write_model(tmp_path, "b/co$t_$x|y")
    text = reported(tmp_path)
    assert "co$t_$x/y" in text and "| model |" in text
    names = re.findall(r"\]\((.*)\.png\)", text)
    assert names == list(report.FIGURES)
    assert all((tmp_path / f"{name}.png").stat().st_size > 5000 for name in names)
    monkeypatch.setattr(report, "draw", lambda *_: "")
    assert "co$t" not in reported(tmp_path, model=("a/model",))


def test_the_same_scope_is_the_posts_model_documents_number_length_and_wording(tmp_path):
    shape = {"shape": {"layers": 24, "hidden": 1024, "heads": 16}, "layers": list(range(18)),
             "state": [128, 128]}

    def scope(model="Qwen/Qwen3.5-0.8B", docs=8, **arguments):
        record = write_result(tmp_path, model, "03_loss.json", "03_loss", [loss_items()[0]] * docs,
                              arguments, **shape)
        return report.differences([{**record, "file": ""}])

    assert scope() == "03_loss: same scope" == scope(model="Qwen/Qwen3.5-0.8B-Base")
    assert scope(model="/data/Qwen3.5-0.8B") == "03_loss: same scope"
    assert scope(docs=3) == "03_loss: --docs 3" and scope(segment=64) == "03_loss: --segment 64"
    assert "another model" in scope(model="me/Qwen3.5-0.8B")
    shape["shape"] = {"layers": 24, "hidden": 2048, "heads": 16}
    assert "another model" in scope(model="/data/Qwen3.5-0.8B")
    shape["shape"] = {"layers": 24, "hidden": 1024, "heads": 16}
    ours = {"task": "vt", "length": 65536}
    record = write_result(tmp_path, "Qwen/Qwen3.5-0.8B", "v.json", "04_ruler", task_items([0] * 50),
                          ours, **shape)
    assert report.differences([record]) == "04_ruler: our wording, not RULER's"
    record["arguments"]["data"] = "x"
    assert report.differences([record]) == "04_ruler: same scope"
    record["items"].pop()
    assert report.differences([record]) == "04_ruler: 49 samples"


def test_an_error_is_given_to_two_digits_and_ties_by_their_number():
    assert gdn.with_error([1.0, 2.0, 6.0]) == "+3.0 ± 1.5"
    assert gdn.with_error([0.00123, 0.0011]) == "+0.001165 ± 0.000065"
    assert gdn.with_error([100.0, 0.0, 0.0]) == "+33 ± 33"
    assert gdn.with_error([0.0, 0.0]) == "+0 (none of 2)"
    assert gdn.with_error([-5.0]) == "-5 (all of 1)"
    assert gdn.with_error([1e-9, 3e-9]) == "+2.0e-09 ± 1.0e-09"


# ---- the README ---------------------------------------------------------------------------------

def test_the_example_in_the_readme_prints_what_it_says():
    blocks = re.findall(r"```(\w*)\n(.*?)```", (HERE / "README.md").read_text(), re.DOTALL)
    languages = [language for language, _ in blocks]
    example = languages.index("python")
    done = subprocess.run([sys.executable, "-c", blocks[example][1]], text=True, cwd=HERE,
                          capture_output=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout == blocks[example + 1][1]


def test_the_readme_names_every_script_and_no_flag_that_does_not_exist():
    text = (HERE / "README.md").read_text()
    for name, module in zip(SCRIPTS, (spectrum, decay, loss, ruler, report)):
        assert f"{name}.py" in text
        for line in re.findall(rf"python {name}.py (.*)", text):
            for flag in re.findall(r"--([a-z-]+)", line):
                assert flag in module.main.__annotations__, (name, flag)


# ---- what a reader of a table or a control relies on --------------------------------------------

def test_the_table_of_02_averages_log_a_before_it_inverts_and_counts_long_heads(capsys):
    items = [{"log_a": [[-0.1, -2 / 10_000, -1.0]], "write_strength": [[0.5, 0.5, 0.5]]},
             {"log_a": [[-0.001, 0.0, -1.0]], "write_strength": [[0.5, 0.5, 0.5]]}]
    run = SimpleNamespace(record={"items": items}, layers=[7], model="m", path="p")
    decay.print_table(run)
    text = capsys.readouterr().out
    assert re.search(r"7 +1\.0 +19\.8 +10000\.0 +0\.500", text), text
    assert "1 of 3 heads have a horizon over 4,096 tokens, 67% one of at most 256" in text


def test_the_table_of_01_names_the_shares_of_energy_by_their_ranks(capsys):
    item = {"effective_rank": [[[3.0, 5.0]]], "energy": {"4": [[0.9, 0.9]], "1": [[0.2, 0.2]]}}
    run = SimpleNamespace(record={"items": [item]}, layers=[7], ranks=[4, 1], model="m", path="p")
    spectrum.print_table(run)
    text = capsys.readouterr().out
    assert "top 4, 1 modes" in text and re.search(r"90\.0% +20\.0%", text), text


def test_random_modes_differ_between_layers_and_their_seeds_between_boundaries(monkeypatch):
    model, seeds = random_model(), []
    cache = new_cache(model)
    list(gdn.segments(model, ids_of(40), 64, cache))
    state = torch.randn(cache.layers[0].recurrent_states[0].shape)
    with torch.inference_mode():
        for i in LAYERS:
            cache.layers[i].recurrent_states[0].copy_(state)
    gdn.truncate_rows(cache, LAYERS, [3], "random")
    first, second = (cache.layers[i].recurrent_states[0] for i in LAYERS)
    assert not torch.allclose(first, second)
    monkeypatch.setattr(gdn, "truncate_rows", lambda *args: seeds.append(args[4]))
    mask = torch.ones(2, 4, dtype=torch.bool)
    loss.measure(model, LAYERS, ids_of(100), 32, [None, 3], "random", mask,
                 {"truncate": 0.0}, NOBAR)
    generate(model, ids_of(100), [None, 3], 1, segment=32)
    assert len(set(seeds[:3])) == 3 and len(set(seeds[3:])) == 3


def test_a_needle_can_stand_before_or_after_the_last_sentence():
    orders = {tuple(ruler.scatter(["hay"], ["needle"], Random(seed))) for seed in range(50)}
    assert orders == {("hay", "needle"), ("needle", "hay")}


def test_the_first_lines_name_what_moves_and_a_panel_has_the_length_of_most_tasks(tmp_path):
    for task, length, numbers in (("vt", 1024, [-50, -40, -45]), ("cwe", 1024, [-10, 0, 0]),
                                  ("fwe", 1024, [10, 0, 8]), ("vt", 4096, [0, 0, 0])):
        write_result(tmp_path, "a/m", f"04_ruler/{task}_{length}.json", "04_ruler",
                     task_items(numbers), {"task": task, "length": length})
    records, _ = report.read_model(tmp_path / "m")
    assert "scores of 1 of 4 tasks by over two" in report.finding(records)
    assert "vt at 1,024 by -45 points" in report.finding(records)
    [(title, runs)] = report.by_variant({"m": records}).items()
    assert title == "m, 1,024 tokens" and len(runs) == 3

"""Tests: the reference module against plain oracles, and every script end to end on a bundled model.

    python -m pytest -q
"""
import gzip
import importlib.util
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from random import Random

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, DynamicCache
from transformers.models.qwen3_5 import modeling_qwen3_5 as qwen

import gdn

transformers.logging.set_verbosity_error()
HERE = Path(__file__).resolve().parent


def script(name):
    spec = importlib.util.spec_from_file_location(name.replace(".py", "").replace("/", "_"), HERE / name)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


spectrum, decay, loss, ruler, report = (script(name) for name in (
    "01_spectrum.py", "02_decay.py", "03_loss.py", "04_ruler.py", "05_report.py"))
LAYERS = ["linear_attention", "linear_attention", "full_attention"]
SMALL = dict(vocab_size=256, hidden_size=32, intermediate_size=48, num_hidden_layers=3, layer_types=LAYERS, eos_token_id=0,
             num_attention_heads=2, num_key_value_heads=1, head_dim=16, linear_num_key_heads=2, linear_num_value_heads=4,
             linear_key_head_dim=16, linear_value_head_dim=16, pad_token_id=0)
EXPERTS = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24, shared_expert_intermediate_size=24)
FAMILIES = {
    "qwen3_5": lambda **more: transformers.Qwen3_5ForCausalLM(transformers.Qwen3_5TextConfig(**{**SMALL, **more})),
    "qwen3_5_moe": lambda: transformers.Qwen3_5MoeForCausalLM(transformers.Qwen3_5MoeTextConfig(**SMALL, **EXPERTS)),
    "qwen3_next": lambda: transformers.Qwen3NextForCausalLM(transformers.Qwen3NextConfig(**SMALL, **EXPERTS)),
    "olmo_hybrid": lambda: transformers.OlmoHybridForCausalLM(transformers.OlmoHybridConfig(
        **{**SMALL, "linear_num_value_heads": 2, "linear_value_head_dim": 24})),
}


@pytest.fixture(scope="module", params=FAMILIES)
def model(request):
    return random_model(request.param)


def random_model(family, **config):
    torch.manual_seed(0)
    net = FAMILIES[family](**config).eval()
    for p in net.parameters():
        if p.ndim > 1:                                        # transformers' 0.02 would leave the states almost unused
            torch.nn.init.normal_(p, std=0.3)
    for m in net.modules():
        if hasattr(m, "A_log"):
            m.A_log.data.uniform_(-5, 1)                      # horizons from a token to hundreds
    return net


@pytest.fixture(scope="module")
def tiny():
    return gdn.load_model("tiny", "cpu")


def ids_of(n, rows=1, vocabulary=256):
    return torch.randint(1, vocabulary, (1, n), generator=torch.Generator().manual_seed(n)).expand(rows, -1)


def random_inputs(T, G=2, H=4, K=8, V=12, dtype=torch.float64):
    g = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, T, G, K, generator=g, dtype=dtype), torch.randn(2, T, G, K, generator=g, dtype=dtype)
    v, b = torch.randn(2, T, H, V, generator=g, dtype=dtype), torch.rand(2, T, H, generator=g, dtype=dtype)
    log_a = -torch.rand(2, T, H, generator=g, dtype=dtype) * torch.logspace(-4, 0, H)
    return q / q.norm(dim=-1, keepdim=True) * K ** -0.5, k / k.norm(dim=-1, keepdim=True), v, log_a, b


# ---- the recurrence --------------------------------------------------------------------------------------------------

def test_recurrence_is_the_posts_equation_written_with_explicit_outer_products():
    q, k, v, log_a, b = random_inputs(5, G=1, H=1)
    y, S = gdn.gated_delta_rule(q, k, v, log_a, b)
    for row in range(2):
        want = torch.zeros(12, 8, dtype=torch.float64)
        for t in range(5):
            a, key = log_a[row, t, 0].exp(), k[row, t, 0]
            want = a * want + b[row, t, 0] * torch.outer(v[row, t, 0] - a * want @ key, key)
            torch.testing.assert_close(y[row, t, 0], want @ q[row, t, 0])
        torch.testing.assert_close(S[row, 0], want)


def test_recurrence_goes_on_from_a_given_state_without_changing_it():
    q, k, v, log_a, b = random_inputs(30)
    y, S = gdn.gated_delta_rule(q, k, v, log_a, b)
    first, middle = gdn.gated_delta_rule(*(x[:, :11] for x in (q, k, v, log_a, b)))
    kept = middle.clone()
    second, end = gdn.gated_delta_rule(*(x[:, 11:] for x in (q, k, v, log_a, b)), state=middle)
    torch.testing.assert_close(torch.cat([first, second], 1), y)
    torch.testing.assert_close(end, S)
    assert torch.equal(middle, kept)


@pytest.mark.parametrize("rule", ["torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule"])
def test_recurrence_equals_both_kernels_of_transformers_with_grouped_heads_and_a_state(rule):
    q, k, v, log_a, b = random_inputs(150, dtype=torch.float32)
    _, state = gdn.gated_delta_rule(*random_inputs(9, dtype=torch.float32))
    y, S = gdn.gated_delta_rule(q, k, v, log_a, b, state)
    theirs, theirs_S = getattr(qwen, rule)(q * 8 ** 0.5, k, v, g=log_a, beta=b, initial_state=state.mT,
                                           output_final_state=True)
    torch.testing.assert_close(theirs, y, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(theirs_S.mT, S, atol=1e-5, rtol=1e-5)


# ---- the state -------------------------------------------------------------------------------------------------------

def spectra():
    """Matrices of known spectra: [name, [4, 24, 24]] in float64."""
    g = torch.Generator().manual_seed(1)
    left, right = (torch.linalg.qr(torch.randn(4, 24, 24, generator=g, dtype=torch.float64)).Q for _ in range(2))
    for name, sigma in (("flat", torch.linspace(1, 0.9, 24)), ("steep", torch.logspace(0, -12, 24)),
                        ("degenerate", torch.tensor([2.0] * 6 + [1.0] * 12 + [0.1] * 6)),
                        ("rank-deficient", torch.tensor([3.0, 2.0, 1.0] + [0.0] * 21)), ("zero", torch.zeros(24))):
        yield name, left * sigma.double() @ right.mT


@pytest.mark.parametrize("name, state", list(spectra()), ids=lambda x: x if isinstance(x, str) else "")
@pytest.mark.parametrize("shape", [(24, 24), (24, 10), (10, 24)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_truncation_is_as_near_to_the_state_as_a_float64_svd_gets(name, state, shape, dtype):
    state = state[:, :shape[0], :shape[1]].to(dtype)
    sigma = torch.linalg.svdvals(state.double())                             # [4, M]
    for rank in (1, 3, 9):
        cut = gdn.truncate(state, rank)
        assert cut.dtype == dtype and cut.shape == state.shape
        error = torch.linalg.matrix_norm(state.double() - cut.double())
        best = sigma[:, rank:].square().sum(-1).sqrt()                       # Eckart and Young
        rounding = 4 * torch.finfo(dtype).eps * torch.linalg.matrix_norm(state.double())
        assert (error <= best * (1 + 1e-6) + rounding).all()
        if dtype == torch.float64:
            assert (torch.linalg.matrix_rank(cut, rtol=1e-9) <= rank).all()
            if name == "flat":                                               # distinct values: the modes are the SVD's
                u, s, vh = torch.linalg.svd(state, full_matrices=False)
                torch.testing.assert_close(cut, u[..., :rank] * s[:, None, :rank] @ vh[:, :rank], atol=1e-9, rtol=0)


def test_truncation_keeping_every_mode_returns_the_state_bit_for_bit():
    state = torch.randn(3, 2, 8, 6)
    assert gdn.truncate(state, 6) is state and gdn.truncate(state, 99) is state
    mixed = gdn.truncate(state, torch.tensor([[6], [2], [7]]))
    assert torch.equal(mixed[[0, 2]], state[[0, 2]]) and not torch.equal(mixed[1], state[1])


def test_truncation_to_a_tensor_of_ranks_equals_one_call_a_rank():
    state = torch.randn(5, 3, 4, 9, 9)                                       # [L, R, H, V, K]
    cut = gdn.truncate(state, torch.tensor([4, 1, 9])[:, None])
    for row, rank in enumerate((4, 1, 9)):
        torch.testing.assert_close(cut[:, row], gdn.truncate(state[:, row], rank), atol=1e-6, rtol=0)


@pytest.mark.parametrize("rank", [0, -3, 1.5, 2.0, True, torch.tensor([2, 0])])
def test_truncation_refuses_ranks_that_are_no_positive_whole_number(rank):
    with pytest.raises(gdn.Error, match="whole number"):
        gdn.truncate(torch.randn(2, 5, 5), rank)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_state_with_nan_or_infinity_is_an_error_that_says_so(bad):
    state = torch.randn(2, 5, 5)
    state[1, 2, 3] = bad
    for measure in (lambda: gdn.truncate(state, 2), lambda: gdn.truncate(state, 5), lambda: gdn.singular_values(state)):
        with pytest.raises(gdn.Error, match="NaN or infinity"):
            measure()


@pytest.mark.parametrize("scale", [1e-30, 1e-18, 1e18, 1e30])
def test_truncation_neither_underflows_nor_overflows_where_a_gram_matrix_would(scale):
    state = torch.randn(2, 8, 8, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(gdn.truncate(state * scale, 3) / scale, gdn.truncate(state, 3), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("shape", [(7, 7), (9, 5), (5, 9)])
def test_an_eigensolver_that_does_not_converge_falls_back_to_an_svd(monkeypatch, shape):
    state = torch.randn(3, *shape)
    want, modes = gdn.truncate(state, 2), gdn.right_modes(state)

    def fail(*_):
        raise torch.linalg.LinAlgError("failed to converge")
    monkeypatch.setattr(torch.linalg, "eigh", fail)
    torch.testing.assert_close(gdn.truncate(state, 2), want, atol=1e-6, rtol=0)
    top = gdn.right_modes(state)[..., -2:]
    torch.testing.assert_close(top @ top.mT, modes[..., -2:] @ modes[..., -2:].mT, atol=1e-9, rtol=0)


def test_the_controls_keep_the_smallest_and_random_modes_of_the_same_number():
    state = torch.randn(4, 3, 6, 6, dtype=torch.float64)
    torch.testing.assert_close(gdn.truncate(state, 2) + gdn.truncate(state, 4, "bottom"), state)
    sigma = gdn.singular_values(state)
    random = gdn.truncate(state, torch.tensor([2, 3, 4]), "random", seed=5)    # ranks along the last batch dimension
    for column, rank in enumerate((2, 3, 4)):
        kept = gdn.singular_values(random[:, column])
        for matrix in range(4):
            for value in kept[matrix, :rank]:
                assert (value - sigma[matrix, column]).abs().min() < 1e-9      # its modes are modes of the state
        assert (kept[:, rank:] < 1e-9).all()
        alone = gdn.truncate(state[:, column:column + 1], torch.tensor([rank]), "random", seed=5)
        torch.testing.assert_close(alone[:, 0], random[:, column])             # whichever ranks are beside it
    assert not torch.allclose(random, gdn.truncate(state, torch.tensor([2, 3, 4]), "random", seed=6))
    with pytest.raises(gdn.Error, match="keep is one of"):
        gdn.truncate(state, 2, "middle")


def test_effective_rank_is_n_for_n_equal_values_one_for_one_and_zero_for_none():
    sigma = torch.tensor([[2.0, 2, 2, 2], [5, 0, 0, 0], [0, 0, 0, 0], [1e-38, 1e-38, 0, 0]])
    torch.testing.assert_close(gdn.effective_rank(sigma), torch.tensor([4.0, 1, 0, 2]))
    p = torch.tensor([0.5, 0.3, 0.2])
    assert gdn.effective_rank(7 * p).item() == pytest.approx(torch.exp(-(p * p.log()).sum()).item())


def test_decay_horizon_averages_the_logarithm_before_it_inverts():
    log_a = torch.tensor([-0.5, -0.001])
    assert gdn.decay_horizon(log_a.mean()).item() == pytest.approx(1 / 0.2505, rel=1e-6)
    assert gdn.decay_horizon(0.0).item() == float("inf")


# ---- the model -------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("segment", [64, 50, 1])
def test_segments_continue_the_recurrence_and_the_convolution_as_one_call_does(model, segment):
    ids = ids_of(137 if segment > 1 else 40, rows=2)
    with torch.no_grad():
        want = model(ids).logits
    boundaries, hidden = [], []
    for start, h in gdn.segments(model, ids, segment, lambda position, cache: boundaries.append(position)):
        assert start == sum(x.shape[1] for x in hidden)
        hidden.append(h)
    with torch.no_grad():
        got = model.get_output_embeddings()(torch.cat(hidden, 1))
    torch.testing.assert_close(got, want, atol=2e-5 * want.abs().max().item(), rtol=0)
    assert boundaries == list(range(segment, ids.shape[1], segment))


def test_the_end_of_a_prompt_is_a_boundary_only_when_another_token_follows(model):
    boundaries, cache = [], DynamicCache(config=model.config)
    note = lambda position, cache: boundaries.append(position)
    list(gdn.segments(model, ids_of(64), 32, note, cache))
    assert boundaries == [32]
    list(gdn.segments(model, ids_of(1), 32, note, cache, position=64))
    list(gdn.segments(model, ids_of(1), 32, note, cache, position=65))
    assert boundaries == [32, 64]


def test_states_read_from_the_cache_are_those_of_the_reference_recurrence(model, monkeypatch):
    module, fed = sys.modules[type(model).__module__], []
    rule = module.torch_chunk_gated_delta_rule

    def record(q, k, v, **kwargs):
        fed.append((q, k, v, kwargs["g"], kwargs["beta"]))
        return rule(q, k, v, **kwargs)
    monkeypatch.setattr(module, "torch_chunk_gated_delta_rule", record)
    cache, layers = DynamicCache(config=model.config), gdn.gdn_layers(model)
    list(gdn.segments(model, ids_of(70, rows=2), 256, None, cache))
    assert layers == [0, 1] and len(fed) == 2
    states = gdn.read_states(cache, layers)                                    # [L, B, H, V, K]
    for state, (q, k, v, g, beta) in zip(states, fed):
        q, k = (qwen.l2norm(x) for x in (q, k))
        _, want = gdn.gated_delta_rule(q * q.shape[-1] ** -0.5, k, v, g, beta)
        torch.testing.assert_close(state, want, atol=1e-4 * want.abs().max().item(), rtol=0)
    assert list(states.shape[-2:]) == gdn.state_shape(model)


def test_recorded_gates_are_what_each_family_computes_from_its_own_projections(model):
    layer = [m for m in model.modules() if type(m).__name__.endswith("GatedDeltaNet")][1]
    inputs = []
    hook = layer.register_forward_pre_hook(lambda m, args, kwargs: inputs.append(
        kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]), with_kwargs=True)
    with gdn.record_gates(model) as gates:
        list(gdn.segments(model, ids_of(33), 32, lambda position, cache: None))     # 32 tokens, then one: both kernels
    hook.remove()
    assert len(gates) == 4 and all(g.dtype == torch.float32 for gate in gates for g in gate)
    for x, (log_a, b) in zip(inputs, gates[1::2]):
        with torch.no_grad():
            if hasattr(layer, "in_proj_ba"):                                        # qwen3_next groups b and a by key head
                both = layer.in_proj_ba(x).unflatten(-1, (layer.num_k_heads, 2, -1))
                raw_b, raw_a = both[..., 0, :].flatten(-2), both[..., 1, :].flatten(-2)
            else:
                raw_b, raw_a = (getattr(layer, f"in_proj_{n}", getattr(layer, f"{n}_proj", None))(x) for n in "ba")
            want_a = -layer.A_log.exp() * torch.nn.functional.softplus(raw_a + layer.dt_bias)
            want_b = raw_b.sigmoid() * (2 if getattr(layer, "allow_neg_eigval", False) else 1)
        torch.testing.assert_close(log_a, want_a)
        torch.testing.assert_close(b, want_b)
    list(gdn.segments(model, ids_of(3), 32, None))
    assert len(gates) == 4                                                          # the functions are restored


def losses(net, ids, ranks, segment=32, keep="top"):
    layers, total = gdn.gdn_layers(net), 0
    batch = ids.expand(len(ranks), -1)
    cut = lambda position, cache: gdn.truncate_rows(cache, layers, ranks, keep, position)
    for start, hidden in gdn.segments(net, batch, segment, cut):
        targets = batch[:, start + 1:start + 1 + hidden.shape[1]]
        total = total + gdn.token_losses(net, hidden[:, :targets.shape[1]], targets).sum(-1)
    return total / (ids.shape[1] - 1)


@pytest.mark.parametrize("keep", gdn.KEEP)
def test_a_row_gives_the_same_result_whichever_rows_run_beside_it(model, keep):
    ids, ranks = ids_of(130), [None, 12, 5, 1]
    together = losses(model, ids, ranks, keep=keep)
    for i, rank in enumerate(ranks):
        assert abs(losses(model, ids, [rank], keep=keep) - together[i]).item() < 1e-5
    assert together.unique().numel() == 4                                           # and the ranks do differ


def test_a_row_that_keeps_all_modes_changes_the_loss_by_less_than_a_millionth(model):
    full, all_modes = losses(model, ids_of(130), [None, min(gdn.state_shape(model))])
    assert abs(full - all_modes).item() < 1e-6


def test_the_run_truncates_as_a_plain_loop_over_layers_rows_and_heads_would(model):
    ids, rank, layers = ids_of(96), 3, gdn.gdn_layers(model)
    cache = DynamicCache(config=model.config)
    with torch.inference_mode():
        for start in (0, 32, 64):
            if start:
                for i in layers:
                    state = cache.layers[i].recurrent_states[0]                     # [1, H, K, V]
                    for head in range(state.shape[1]):
                        u, s, vh = torch.linalg.svd(state[0, head].double(), full_matrices=False)
                        state[0, head] = (u[:, :rank] * s[:rank] @ vh[:rank]).float()
            logits = model(ids[:, start:start + 32], cache=cache, use_cache=True).logits
    *_, (_, hidden) = gdn.segments(model, ids, 32, lambda p, cache: gdn.truncate_rows(cache, layers, [rank]))
    with torch.no_grad():
        got = model.get_output_embeddings()(hidden)
    torch.testing.assert_close(got, logits, atol=1e-4 * logits.abs().max().item(), rtol=0)


def test_the_loss_is_that_of_transformers_own_cross_entropy(model):
    ids = ids_of(100)
    with torch.no_grad():
        want = model(ids, labels=ids).loss
    assert losses(model, ids, [None]).item() == pytest.approx(want.item(), abs=1e-5)


def test_a_checkpoint_saved_with_its_vision_tower_loads_as_its_text_model(tmp_path, tiny):
    vision = dict(depth=1, hidden_size=16, intermediate_size=16, num_heads=2, out_hidden_size=32)
    whole = transformers.Qwen3_5ForConditionalGeneration(transformers.Qwen3_5Config(
        text_config={k: v for k, v in SMALL.items()} | {"vocab_size": 4096}, vision_config=vision))
    whole.save_pretrained(tmp_path)
    tiny[1].save_pretrained(tmp_path)
    net, _, layers = gdn.load_model(str(tmp_path), "cpu")
    assert type(net).__name__ == "Qwen3_5ForCausalLM" and layers == [0, 1] and gdn.state_shape(net) == [16, 16]
    ids = ids_of(20)
    with torch.no_grad():
        torch.testing.assert_close(net(ids).logits, whole.eval()(ids).logits)


def test_a_model_without_gdn_layers_or_without_a_checkpoint_is_told_before_weights_are_read(tmp_path, monkeypatch):
    transformers.LlamaConfig(num_hidden_layers=1).save_pretrained(tmp_path)
    with pytest.raises(gdn.Error, match="no Gated DeltaNet layers"):
        gdn.model_config(str(tmp_path))
    monkeypatch.setattr(gdn.huggingface_hub.constants, "HF_HUB_OFFLINE", True)      # no attempts, no waiting
    with pytest.raises(gdn.Error, match="cannot load"):
        gdn.model_config("no/such-model")


# ---- documents and result files --------------------------------------------------------------------------------------

def test_a_checkpoint_that_lacks_weights_or_a_tokenizer_is_refused_rather_than_filled_at_random(tmp_path, tiny):
    net, tokenizer, _ = tiny
    net.save_pretrained(tmp_path)
    with pytest.raises(gdn.Error, match="tokenizer"):
        gdn.load_tokenizer(str(tmp_path))
    tokenizer.save_pretrained(tmp_path)
    config = gdn.read_json(tmp_path / "config.json")
    config.update(num_hidden_layers=5, layer_types=[*config["layer_types"], "linear_attention"])
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(gdn.Error, match="lacks weights"):
        gdn.load_model(str(tmp_path), "cpu")
    (tmp_path / "model.safetensors").write_bytes((tmp_path / "model.safetensors").read_bytes()[:1000])
    with pytest.raises(gdn.Error, match="cannot load the weights of the folder"):
        gdn.load_model(str(tmp_path), "cpu")


def test_documents_come_in_order_from_text_jsonl_gzip_and_folders_and_are_cut_to_length(tmp_path, tiny):
    long, short = "a b c d e f g h " * 20, "too short"
    (tmp_path / "one.txt").write_text(long)
    lines = "\n".join(json.dumps({"text": t}) for t in (short, long, long + "x"))
    (tmp_path / "two.jsonl").write_text(lines)
    with gzip.open(tmp_path / "three.jsonl.gz", "wt") as file:
        file.write(lines)
    want = tiny[1](long).input_ids[:50]
    for source, names in (("one.txt", ["one.txt"]), ("two.jsonl", ["two.jsonl:2", "two.jsonl:3"]),
                          ("three.jsonl.gz", ["three.jsonl.gz:2"]), (".", ["one.txt", "three.jsonl.gz:2"])):
        found = gdn.documents(str(tmp_path / source), tiny[1], len(names), 50)
        assert [name for name, *_ in found] == names
        assert all(ids.tolist() == [want] and len(sha) == 64 for _, sha, ids in found)
    with pytest.raises(gdn.Error, match="1 of 1 documents .* --docs asks for 2"):
        gdn.documents(str(tmp_path / "one.txt"), tiny[1], 2, 50)


@pytest.mark.parametrize("line", ["{", "[1]", '{"txt": "a"}', '{"text": 3}', "[" * 100_000])
def test_a_bad_line_of_a_documents_file_is_named(tmp_path, tiny, line):
    (tmp_path / "bad.jsonl").write_text('{"text": "fine"}\n' + line)
    with pytest.raises(gdn.Error, match="line 2"):
        gdn.documents(str(tmp_path / "bad.jsonl"), tiny[1], 1, 50)
    (tmp_path / "binary.txt").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(gdn.Error, match="UTF-8"):
        gdn.documents(str(tmp_path / "binary.txt"), tiny[1], 1, 1)
    whole = gzip.compress(b'{"text": "a b c"}\n' * 200)
    for content in (whole[:-9], whole[:30] + b"\x00" * 9 + whole[39:], b"no gzip", gzip.compress(b"\xff\xfe")):
        (tmp_path / "broken.jsonl.gz").write_bytes(content)
        with pytest.raises(gdn.Error, match="cannot read|line"):
            gdn.documents(str(tmp_path / "broken.jsonl.gz"), tiny[1], 1, 50)


def test_a_document_with_half_a_surrogate_pair_and_a_folder_without_documents_are_no_crash(tmp_path, tiny):
    (tmp_path / "odd.JSONL").write_text(json.dumps({"text": "a \ud800 b " * 30}))
    assert len(gdn.documents(str(tmp_path / "odd.JSONL"), tiny[1], 1, 20)) == 1
    (tmp_path / "empty").mkdir()
    with pytest.raises(gdn.Error, match="holds no document"):
        gdn.documents(str(tmp_path / "empty"), tiny[1], 1, 20)
    for missing in ("~nosuchuser/x", "a" * 400):
        with pytest.raises(gdn.Error, match="existing file or folder"):
            gdn.documents(missing, tiny[1], 1, 20)


def test_c4_comes_from_the_hub_in_shard_order_and_its_absence_is_told(tmp_path, tiny, monkeypatch):
    asked = []

    def download(repo, file, repo_type):
        assert (repo, repo_type) == ("allenai/c4", "dataset")
        asked.append(file)
        with gzip.open(tmp_path / Path(file).name, "wt") as out:
            out.write(json.dumps({"text": "word " * 30, "url": ""}) + "\n")
        return str(tmp_path / Path(file).name)
    monkeypatch.setattr(gdn.huggingface_hub, "hf_hub_download", download)
    assert len(gdn.documents("c4", tiny[1], 2, 20)) == 2
    assert asked == ["en/c4-validation.00000-of-00008.json.gz", "en/c4-validation.00001-of-00008.json.gz"]
    monkeypatch.setattr(gdn.huggingface_hub, "hf_hub_download", lambda *a, **k: (_ for _ in ()).throw(OSError("no route")))
    with pytest.raises(gdn.Error, match="cannot download"):
        gdn.documents("c4", tiny[1], 1, 20)


def test_the_held_out_files_and_the_training_files_are_disjoint_and_both_plenty():
    held, trained = gdn.stdlib_files(True), gdn.stdlib_files(False)
    assert not set(held) & set(trained) and len(held) > 50 and len(trained) > 200
    assert not any("test" in path.parts or "site-packages" in path.parts for path in held + trained)


def test_a_result_file_is_written_whole_or_not_at_all(tmp_path):
    path = tmp_path / "new" / "file.json"
    gdn.write_json(path, {"a": 1})
    with pytest.raises(gdn.Error, match="NaN"):
        gdn.write_json(path, {"a": float("nan")})
    with pytest.raises(TypeError):
        gdn.write_json(path, {"a": object()})
    assert gdn.read_json(path) == {"a": 1} and [p.name for p in path.parent.iterdir()] == ["file.json"]
    path.write_text('{"a": 1')
    assert gdn.read_json(path) == {}


def test_mean_and_standard_error_of_paired_changes_have_ddof_1():
    assert gdn.mean_se([1.0, 2.0, 6.0]) == {"mean": 3.0, "se": pytest.approx((7 / 3) ** 0.5)}
    assert gdn.mean_se([4.0]) == {"mean": 4.0, "se": None}


# ---- the tasks -------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("task", ruler.TASKS)
def test_samples_fill_the_length_never_exceed_it_and_hide_each_answer_once(task, tiny):
    tokenizer, first = tiny[1], set()
    for length, count in ((512, 20), (1024, 8), (2048, 4), (4096, 3)):
        for i in range(count):
            sample, tokens = ruler.make_sample(task, length, i, 0, tokenizer)
            prompt, refs = sample["prompt"], sample["references"]
            assert tokens == len(tokenizer(prompt).input_ids) + ruler.NEW_TOKENS[ruler.family(task)] <= length
            assert tokens >= (0.95 if task != "niah_multikey_3" or length > 2048 else 0.7) * length
            assert not prompt.endswith(" ") and len(set(refs)) == len(refs)
            context = prompt[:prompt.rindex("\n")]
            if length >= 2048 and task in ("vt", "cwe"):
                example, context = context.split("\n\n")
                assert not any(re.search(rf"\b{ref}\b", example) for ref in refs)
            getattr(sys.modules[__name__], f"check_{ruler.family(task)}")(task, context, prompt, refs, length)
            first.add(context.index(refs[0]) * 4 // len(context))
            assert not any(a != b and a in b for a in refs for b in refs)
    if task not in ("cwe", "fwe"):                             # their words are all over the text
        assert len(first) > 1                                  # no answer stands at one place


def check_niah(task, context, prompt, refs, length):
    needles = re.findall(r"The code of (\S+) is (\S+)\.", context)
    asked = re.findall(r" The codes? of (.*) (?:is|are)$", prompt)[0].replace(" and ", ", ").split(", ")
    assert [value for key in asked for name, value in needles if name == key] and len({v for _, v in needles}) == len(needles)
    assert sorted(value for name, value in needles if name in asked) == sorted(refs)
    wanted = {"niah_multikey_1": 4, "niah_multivalue": 4, "niah_multiquery": 4}.get(task, 1)
    if "multikey_2" in task or "multikey_3" in task:
        assert len(needles) >= 2 and len({name for name, _ in needles}) == len(needles)
        assert re.sub(r"The code of \S+ is \S+\. ?", "", context).count("\n") == 1
    else:
        assert len(needles) == wanted
    for value in refs:
        assert context.count(value) == 1


def check_vt(task, context, prompt, refs, length):
    value = re.findall(r"Which variables hold (\d{5})\?", prompt)[-1]
    assert re.findall(r"VAR ([A-Z]{5}) = ", context) == refs and len(refs) == 5
    assert re.findall(r" = (?:VAR )?(\w+)\.", context) == [value, *refs[:-1]]
    for name in refs:                                          # nowhere but in its own and the next assignment
        assert context.upper().count(name) == (1 if name == refs[-1] else 2)


def check_cwe(task, context, prompt, refs, length):
    words = re.findall(r"^\d+ (\S+)$", context, re.MULTILINE)
    counts = {word: words.count(word) for word in set(words)}
    common, rare = (6, 1) if length < 4096 else (30, 3)
    assert len(refs) == 10 and all(counts[word] == common for word in refs)
    assert all(n == rare for word, n in counts.items() if word not in refs)
    assert not any(ref in word for ref in refs for word in counts if word != ref)
    assert [int(n) for n in re.findall(r"^(\d+) ", context, re.MULTILINE)] == list(range(1, len(words) + 1))


def check_fwe(task, context, prompt, refs, length):
    words = context.split("\n")[1].split()
    counts = sorted(((words.count(word), word) for word in set(words)), reverse=True)
    assert counts[0][1] == "..." and [word for _, word in counts[1:4]] == refs and len(counts) <= max(length // 50, 4)
    assert counts[1][0] > counts[2][0] > counts[3][0] > (counts[4][0] if len(counts) > 4 else 0)
    assert all(re.fullmatch("[a-z]{6}", word) for _, word in counts[1:])


@pytest.mark.parametrize("task", ruler.TASKS)
def test_a_sample_depends_on_its_seed_and_index_and_on_nothing_else(task, tiny):
    make = lambda i, seed: ruler.make_sample(task, 600, i, seed, tiny[1])[0]
    assert make(3, 0) == make(3, 0) and len({make(i, s)["prompt"] for i in range(3) for s in range(2)}) == 6


@pytest.mark.parametrize("task", ruler.TASKS)
def test_tokens_grow_with_the_size_as_the_search_for_the_largest_assumes(task, tiny):
    smallest = ruler.SMALLEST[ruler.family(task)]
    tokens = [ruler.make_sample(task, 4096, 1, 0, tiny[1], size)[1] for size in range(smallest, smallest + 25)]
    assert all(b > a - 8 for a, b in zip(tokens, tokens[1:])) and tokens[-1] > tokens[0]


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
    assert ruler.score("vt", "they are abcde FGHIJ.", ["ABCDE", "FGHIJ", "KLMNO", "PQRST"]) == 50.0
    assert ruler.score("niah_single_1", "1234567", ["1234567"]) == 100.0 and ruler.score("cwe", "", ["a", "b"]) == 0.0
    assert ruler.score("cwe", "artist", ["art", "artist"]) == 100.0       # as in RULER: a substring is found
    assert ruler.score("qa_1", "in Paris", ["paris", "the city of Paris"]) == 100.0        # any wording of the answer
    assert ruler.score("cwe", "in Paris", ["paris", "rome"]) == 50.0


@pytest.mark.parametrize("segment, ranks", [(256, [None]), (50, [None, 2]), (7, [None, 1, 2])])
def test_row_0_generates_what_transformers_generates_token_for_token(tiny, segment, ranks):
    net, tokenizer, layers = tiny
    for i in range(3):
        sample, _ = ruler.make_sample("vt", 256, i, 1, tokenizer)
        ids = tokenizer(sample["prompt"], return_tensors="pt").input_ids
        want = net.generate(ids, do_sample=False, max_new_tokens=40)[0, ids.shape[1]:].tolist()
        want = want[:-1] if want[-1] == tokenizer.eos_token_id else want
        assert ruler.generate(net, layers, ids, ranks, segment, 40, {tokenizer.eos_token_id}, {})[0] == want


def test_a_boundary_inside_the_answer_truncates_there(monkeypatch):
    net, cuts = random_model("qwen3_5"), []
    truncate = gdn.truncate_rows
    monkeypatch.setattr(gdn, "truncate_rows", lambda cache, layers, ranks, **k: (
        cuts.append(cache.get_seq_length()), truncate(cache, layers, ranks, **k)))
    ids, layers = ids_of(60), gdn.gdn_layers(net)
    answers = ruler.generate(net, layers, ids, [None, 1], 32, 12, {-1}, {})
    assert cuts == [32, 64] and [len(a) for a in answers] == [12, 12]
    answer, cache, feed, position = [], DynamicCache(config=net.config), ids, 0      # the same by a plain loop
    for token in range(12):
        for t in feed[0].tolist():
            if position in (32, 64):
                truncate(cache, layers, [1])
            with torch.no_grad():
                logits = net(torch.tensor([[t]]), cache=cache, use_cache=True).logits
            position += 1
        feed = logits[:, -1:].argmax(-1)
        answer.append(feed.item())
    assert answers[1] == answer


UPSTREAM = [{"index": 0, "input": "Note well: the pass word of Ann is 4821.\nTell the pass word of Ann.",
             "answer_prefix": " The pass word of Ann is", "outputs": ["4821"], "length": 160},
            {"index": 1, "input": "Note well: the pass word of Bob is 7777.\nTell the pass word of Bob.",
             "answer_prefix": " The pass word of Bob is", "outputs": ["7777", "other"], "length": 160}]


def test_a_file_in_rulers_format_runs_as_it_is_and_is_scored(tmp_path, monkeypatch):
    folder = tmp_path / "data" / "niah_single_2"
    folder.mkdir(parents=True)
    (folder / "validation.jsonl").write_text("\n".join(map(json.dumps, UPSTREAM)) + "\n")
    prompts = []
    monkeypatch.setattr(ruler, "generate", lambda net, layers, ids, ranks, segment, new, stop, timing: (
        prompts.append((ids[0].tolist(), new)), timing.update(model=1.0, boundary=0.0),
        [gdn.load_tokenizer("tiny")(" it is 4821 or OTHER").input_ids] * len(ranks))[-1])
    ruler.main(data=str(tmp_path / "data"), results=str(tmp_path / "r"), ranks=8)
    record = gdn.read_json(tmp_path / "r" / "recurrent" / "04_ruler" / "niah_single_2_160.json")
    tokenizer = gdn.load_tokenizer("tiny")
    assert [(tokenizer.decode(ids), new) for ids, new in prompts] == [(u["input"] + u["answer_prefix"], 128) for u in UPSTREAM]
    assert [s["scores"]["full"] for s in record["results"]["samples"]] == [100.0, 50.0]
    assert [s["references"] for s in record["results"]["samples"]] == [u["outputs"] for u in UPSTREAM]
    with pytest.raises(gdn.Error, match="name its task"):
        ruler.main(data=str(folder / "validation.jsonl"), tasks="vt,cwe", results=str(tmp_path / "r"))


@pytest.mark.parametrize("line", ["{", '{"input": "a", "outputs": ["b"], "length": 5}', '"text"', "[" * 100_000,
                                  '{"input": "", "answer_prefix": "", "outputs": ["b"], "length": 5}',
                                  '{"input": "a", "answer_prefix": "", "outputs": [""], "length": 5}',
                                  '{"input": "a", "answer_prefix": "", "outputs": ["b"], "length": -5}',
                                  '{"input": "a", "answer_prefix": "", "outputs": ["b"], "length": Infinity}',
                                  '{"input": "a", "answer_prefix": "", "outputs": "b", "length": 5}',
                                  '{"input": "a", "answer_prefix": "", "outputs": [], "length": 5}'])
def test_a_bad_line_of_a_ruler_file_is_named(tmp_path, line):
    (tmp_path / "vt.jsonl").write_text(json.dumps(UPSTREAM[0]) + "\n" + line)
    with pytest.raises(gdn.Error, match="line 2"):
        ruler.main(data=str(tmp_path / "vt.jsonl"), tasks="vt")


def test_a_length_too_short_for_a_task_is_told_at_once_with_the_shortest_that_works(tmp_path):
    for task in ruler.TASKS:
        with pytest.raises(gdn.Error, match="the shortest that works") as error:
            ruler.main(tasks=task, lengths=60, samples=2, results=str(tmp_path))
        shortest = int(str(error.value).split()[-1])
        for i in range(2):
            assert ruler.make_sample(task, shortest, i, 0, gdn.load_tokenizer("tiny"))[1] <= shortest


def test_a_killed_ruler_run_goes_on_to_the_same_file_and_other_arguments_are_refused(tmp_path, monkeypatch):
    flags = dict(tasks="niah_single_1", lengths=300, samples=4, ranks="8,1", segment=64)
    ruler.main(**flags, results=str(tmp_path / "whole"))
    name = Path("recurrent", "04_ruler", "niah_single_1_300.json")
    generate, calls = ruler.generate, []

    def killed(*args):
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return generate(*args)
    monkeypatch.setattr(ruler, "generate", killed)
    with pytest.raises(KeyboardInterrupt):
        ruler.main(**flags, results=str(tmp_path / "killed"))
    assert len(gdn.read_json(tmp_path / "killed" / name)["results"]["samples"]) == 2
    monkeypatch.setattr(ruler, "generate", generate)
    ruler.main(**flags, rows=1, results=str(tmp_path / "killed"))                    # and with other rows side by side
    whole, resumed = (gdn.read_json(tmp_path / run / name)["results"] for run in ("whole", "killed"))
    assert whole == resumed
    for other in (dict(ranks=8), dict(seed=1), dict(segment=32), dict(dtype="bfloat16")):
        with pytest.raises(gdn.Error, match="to start over"):
            ruler.main(**{**flags, **other}, results=str(tmp_path / "killed"))
    assert gdn.read_json(tmp_path / "killed" / name)["results"] == whole


# ---- the scripts, end to end -----------------------------------------------------------------------------------------

@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder = tmp_path_factory.mktemp("results")
    few = dict(docs=2, tokens=700, results=str(folder))
    for name in ("tiny/recurrent", "tiny/hybrid"):
        spectrum.main(model=name, **few)
        decay.main(model=name, **few)
        for keep in gdn.KEEP:
            loss.main(model=name, keep=keep, ranks="64,16,2", **few)
        ruler.main(model=name, tasks="niah_multikey_2,vt", lengths=512, samples=2, ranks="32,2", results=str(folder))
    report.main(results=str(folder))
    return folder


def test_result_files_have_the_documented_keys_and_their_means_can_be_recomputed(results):
    for path in results.glob("*/**/*.json"):
        data = gdn.read_json(path)
        assert set(data) == {"script", "model", "arguments", "environment", "timing", "results"}, path
        assert set(data["timing"]) == {"tokens_per_second", "model_seconds", "truncate_seconds", "total_seconds"}
        assert set(data["environment"]) == {"torch", "transformers", "device", "dtype", "weights"}
    found = gdn.read_json(results / "recurrent" / "03_loss.json")["results"]
    assert list(found["loss"]) == ["full", "64", "16", "2"] and all(len(v) == 2 for v in found["loss"].values())
    assert found["change"]["64"]["mean"] == pytest.approx(0, abs=1e-6)
    want = gdn.mean_se([a - b for a, b in zip(found["loss"]["2"], found["loss"]["full"])])
    assert found["change"]["2"] == want and len(found["documents"][0]["sha256"]) == 64
    found = gdn.read_json(results / "recurrent" / "01_spectrum.json")["results"]
    assert found["course"]["positions"] == [256, 512] and found["layers"] == [1, 2, 3] and found["state"] == [64, 64]
    course = torch.tensor(found["course"]["effective_rank"])
    torch.testing.assert_close(course.mean(0), torch.tensor(found["effective_rank"]))
    torch.testing.assert_close(torch.tensor(found["spectrum"]).sum(-1), torch.ones(3, 4), atol=1e-4, rtol=0)
    for key in ("energy", "overlap"):
        for rank, share in found[key].items():
            assert ((torch.tensor(share) > 0) & (torch.tensor(share) < 1 + 1e-6)).all()
    found = gdn.read_json(results / "hybrid" / "02_decay.json")["results"]
    horizon = torch.tensor(found["horizon"])
    assert found["heads"] == 12 and found["long_heads"] == int((horizon > 4096).sum())
    assert found["short_share"] == (horizon <= 256).float().mean()


def test_the_first_boundarys_effective_rank_is_the_references_on_the_raw_cache(results, tiny):
    net, tokenizer, layers = tiny
    ranks = []
    for _, _, ids in gdn.documents("stdlib", tokenizer, 2, 700):
        with torch.no_grad():
            cache = net(ids[:, :256], use_cache=True).cache
        sigma = torch.linalg.svdvals(torch.cat([cache.layers[i].recurrent_states[0] for i in layers]).double())
        p = sigma / sigma.sum(-1, keepdim=True)
        ranks.append((-(p * p.log()).sum(-1)).exp())
    found = gdn.read_json(results / "recurrent" / "01_spectrum.json")["results"]["course"]["effective_rank"][0]
    torch.testing.assert_close(torch.tensor(found).double(), torch.stack(ranks).mean(0), atol=1e-3, rtol=1e-3)


def test_the_report_shows_every_model_stage_and_claim_with_its_scope(results):
    text = (results / "report.md").read_text()
    for figure in ("rank_against_horizon", "spectra", "loss", "size", "tasks"):
        assert f"({figure}.png)" in text and (results / f"{figure}.png").stat().st_size > 5000
    for words in ("| hybrid |", "| recurrent |", "another model", "documents stdlib", "niah_multikey_2", "random", "bottom"):
        assert words in text
    assert all(claim[0] in text and claim[1] in text for claim in report.CLAIMS) and "same scope" not in text
    assert "has not run" not in text and "nan" not in text


def test_the_report_names_what_is_missing_or_damaged_and_reports_the_rest(results, tmp_path):
    folder = tmp_path / "recurrent"
    folder.mkdir()
    whole = (results / "recurrent" / "03_loss.json").read_text()
    (folder / "03_loss.json").write_text(whole)
    (folder / "02_decay.json").write_text('{"results": {}}')
    (folder / "01_spectrum.json").write_text(whole[:500])
    (folder / "04_ruler").mkdir()
    (folder / "04_ruler" / "vt_512.json").write_text("[]")
    (tmp_path / "empty").mkdir()
    report.main(results=str(tmp_path))
    text = (tmp_path / "report.md").read_text()
    for words in ("01_spectrum.json is damaged", "02_decay.json is damaged", "vt_512.json is damaged", "empty: 03_loss has not run",
                  "(loss.png)"):
        assert words in text
    with pytest.raises(gdn.Error, match="no result file"):
        report.main(results=str(tmp_path / "empty"))


DAMAGE = [("02_decay", ("timing",), {}), ("02_decay", ("arguments",), "x"), ("02_decay", ("model",), 5),
          ("02_decay", ("results", "horizon"), []), ("02_decay", ("results", "horizon"), [[1.0]]),
          ("03_loss", ("results", "state"), [0, 0]), ("03_loss", ("results", "loss", "full"), []),
          ("03_loss", ("timing", "total_seconds"), "a"), ("01_spectrum", ("results", "energy"), {}),
          ("01_spectrum", ("results", "layers"), []), ("04_ruler/vt_512", ("timing",), None),
          ("04_ruler/vt_512", ("results", "samples"), [])]


@pytest.mark.parametrize("file, keys, value", DAMAGE)
def test_a_result_file_of_an_unexpected_shape_is_called_damaged_and_never_ends_the_report(results, tmp_path, file, keys, value):
    shutil.copytree(results / "recurrent", tmp_path / "recurrent")
    data = gdn.read_json(tmp_path / "recurrent" / f"{file}.json")
    inner = data
    for key in keys[:-1]:
        inner = inner[key]
    inner[keys[-1]] = value
    gdn.write_json(tmp_path / "recurrent" / f"{file}.json", data)
    report.main(results=str(tmp_path))
    assert f"{file}.json is damaged" in (tmp_path / "report.md").read_text()
    if file.startswith("04"):
        with pytest.raises(gdn.Error, match="is damaged"):
            ruler.main(tasks="vt", lengths=512, samples=2, ranks="32,2", results=str(tmp_path))
            assert value == []                                 # no samples yet: the run goes on from there
            raise gdn.Error("is damaged")


def test_the_report_says_when_a_models_files_come_from_different_weights(results, tmp_path):
    shutil.copytree(results / "recurrent", tmp_path / "recurrent")
    data = gdn.read_json(results / "recurrent" / "02_decay.json")
    data["environment"]["weights"] = "0123abcd"
    gdn.write_json(tmp_path / "recurrent" / "02_decay.json", data)
    for folder, says in ((tmp_path, True), (results, False)):
        report.main(results=str(folder))
        assert ("different weights" in (folder / "report.md").read_text()) == says


def test_a_claim_is_compared_at_the_posts_lengths_where_they_were_run(results, tmp_path):
    folder = tmp_path / "recurrent" / "04_ruler"
    folder.mkdir(parents=True)
    for length in (512, 16384, 65536, 131072):
        data = gdn.read_json(results / "recurrent" / "04_ruler" / "vt_512.json")
        data["arguments"]["length"] = length
        gdn.write_json(folder / f"vt_{length}.json", data)
    report.main(results=str(tmp_path))
    row = next(line for line in (tmp_path / "report.md").read_text().splitlines() if "variable tracking (vt) at 64K" in line)
    assert "at 65,536" in row and "at 512" not in row and "other lengths" not in row


def test_a_claim_counts_as_the_same_scope_only_for_the_posts_model_documents_and_length(results, tmp_path):
    data = gdn.read_json(results / "recurrent" / "02_decay.json")
    data["model"] = "Qwen/Qwen3.5-0.8B"
    data["arguments"].update(documents="c4", tokens=16384, docs=8)
    gdn.write_json(tmp_path / "Qwen3.5-0.8B" / "02_decay.json", data)
    report.main(results=str(tmp_path))
    assert (tmp_path / "report.md").read_text().count("same scope") == 2           # the two counts of stage 02
    data["arguments"].update(tokens=4096)
    gdn.write_json(tmp_path / "Qwen3.5-0.8B" / "02_decay.json", data)
    report.main(results=str(tmp_path))
    assert "same scope" not in (tmp_path / "report.md").read_text()


@pytest.mark.parametrize("stage", [spectrum, decay, loss])
def test_a_killed_stage_leaves_no_result_file_and_the_next_run_goes_on_to_the_same_one(tmp_path, monkeypatch, stage, results):
    name = {"01": "01_spectrum", "02": "02_decay", "03": "03_loss"}[stage.__name__[:2]]
    flags = dict(docs=2, tokens=700, results=str(tmp_path), **({"ranks": "64,16,2"} if stage is loss else {}))
    segments, calls = gdn.segments, []

    def killed(*args, **kwargs):
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return segments(*args, **kwargs)
    monkeypatch.setattr(gdn, "segments", killed)
    with pytest.raises(KeyboardInterrupt):
        stage.main(**flags)
    folder = tmp_path / "recurrent"
    assert not (folder / f"{name}.json").exists() and len(list(folder.glob(f"{name}.*.part.json"))) == 1
    stage.main(**flags)
    assert len(calls) == 3 and [p.name for p in folder.iterdir()] == [f"{name}.json"]       # one document was not run again
    ours, whole = (gdn.read_json(root / "recurrent" / f"{name}.json")["results"] for root in (tmp_path, results))
    assert json.dumps(ours) == json.dumps(whole) if stage is not loss else ours["loss"].keys() == whole["loss"].keys()


def test_a_finished_result_is_not_replaced_by_a_run_with_other_flags(results):
    before = (results / "recurrent" / "03_loss.json").read_bytes()
    with pytest.raises(gdn.Error, match="was made with --docs 2, not 1"):
        loss.main(docs=1, tokens=700, ranks="64,16,2", results=str(results))
    assert (results / "recurrent" / "03_loss.json").read_bytes() == before


@pytest.mark.parametrize("stage, flags", [
    (spectrum, dict(docs=2, tokens=700)), (decay, dict(docs=2, tokens=700)),
    (loss, dict(docs=2, tokens=700, ranks="64,16,2", rows=1)),
    (ruler, dict(tasks="niah_multikey_2,vt", lengths=512, samples=2, ranks="32,2"))])
def test_a_finished_result_is_not_measured_again_nor_mixed_with_other_weights(monkeypatch, results, stage, flags):
    before = {path: path.read_bytes() for path in (results / "recurrent").glob("**/*.json")}
    monkeypatch.setattr(gdn, "segments", lambda *_: pytest.fail("it ran again"))
    stage.main(**flags, results=str(results))
    monkeypatch.setattr(gdn, "fingerprint", lambda net: "0123abcd")
    with pytest.raises(gdn.Error, match="the weights .*, not 0123abcd"):
        stage.main(**flags, results=str(results))
    assert before == {path: path.read_bytes() for path in (results / "recurrent").glob("**/*.json")}


def test_the_same_weights_have_the_same_fingerprint_and_weights_trained_further_another():
    net = random_model("qwen3_5")
    before = gdn.fingerprint(net)
    assert before == gdn.fingerprint(random_model("qwen3_5"))
    net.lm_head.weight.data *= 1.001
    assert gdn.fingerprint(net) != before


def test_results_of_another_model_are_never_overwritten(tmp_path, results):
    folder = tmp_path / "results" / "recurrent"
    folder.mkdir(parents=True)
    data = gdn.read_json(results / "recurrent" / "02_decay.json")
    gdn.write_json(folder / "02_decay.json", {**data, "model": "somebody/recurrent"})
    with pytest.raises(gdn.Error, match="another model"):
        decay.main(docs=1, tokens=300, results=str(tmp_path / "results"))


def run(*words):
    return subprocess.run([sys.executable, *map(str, words)], capture_output=True, text=True, cwd=HERE.parent, timeout=120)


@pytest.mark.parametrize("words", [
    ("01_spectrum.py", "--modle", "tiny"), ("02_decay.py", "--docs", "0"), ("03_loss.py", "--ranks", "65"),
    ("03_loss.py", "--docs", "1", "--docs", "2"), ("03_loss.py", "--keep", "top,bottom"), ("03_loss.py", "--model"),
    ("03_loss.py", "--device", "warp"), ("04_ruler.py", "--tasks", "vtt"), ("05_report.py", "--result", "x"),
    ("tiny/train.py", "--stpes", "5"), ("tiny/train.py", "--name", "hybird")])
def test_a_mistake_on_the_command_line_ends_in_one_sentence_and_a_non_zero_exit_code(words):
    done = run(HERE / words[0], *words[1:])
    assert done.returncode != 0 and len(done.stderr.strip().splitlines()) == 1 and "Traceback" not in done.stderr, done.stderr
    assert words[-1].strip("-") in done.stderr or words[1] in done.stderr


@pytest.mark.parametrize("stage, flags", [
    (loss, {"ranks": 0}), (loss, {"ranks": "8,x"}), (loss, {"ranks": ""}), (loss, {"ranks": 1.5}), (loss, {"keep": "best"}),
    (loss, {"rows": 0}), (loss, {"tokens": -5}), (loss, {"docs": True}), (loss, {"segment": 2.5}), (loss, {"dtype": "int8"}),
    (spectrum, {"tokens": 400}), (loss, {"tokens": 257}), (ruler, {"lengths": "-512"}),
    (ruler, {"lengths": 384, "tasks": "niah_single_1"}),
    (ruler, {"lengths": 512, "segment": 512, "tasks": "vt"}), (ruler, {"samples": 0}),
    (ruler, {"data": "no/such.jsonl"}), (ruler, {"seed": "x"}), (decay, {"device": "cuda:99"})])
def test_a_bad_value_is_an_error_before_the_model_is_loaded(monkeypatch, tmp_path, stage, flags):
    monkeypatch.setattr(gdn, "load_model", lambda *_: pytest.fail("the model was loaded"))
    with pytest.raises(gdn.Error):
        stage.main(**flags, results=str(tmp_path))


@pytest.mark.parametrize("value", ["48,12", (48, 12), [48, 12], "12,48", " 48 , 12 "])
def test_a_list_of_ranks_is_understood_however_fire_hands_it_over(value):
    assert gdn.check_ranks(value, "tiny") == [48, 12] and gdn.check_ranks(12, "tiny") == [12]


def test_help_lists_every_flag_with_its_default_and_every_script_runs_as_a_program(tmp_path):
    done = run(HERE / "04_ruler.py", "--help")
    text = done.stdout + done.stderr
    for flag in ("model", "tasks", "lengths", "samples", "ranks", "seed", "data", "segment", "rows", "device", "dtype", "results"):
        assert f"--{flag}" in text
    assert "Default: 'tiny'" in text and "Default: 256" in text and done.returncode == 0
    done = run(HERE / "03_loss.py", "--docs", 1, "--tokens", 300, "--ranks=[48,12]", "--results", tmp_path)
    assert done.returncode == 0 and "03_loss: tiny, 3 GDN layers x 4 heads, states 64 x 64, float32 on cpu" in done.stderr
    assert done.stdout.strip().endswith("03_loss.json") and "12" in done.stdout
    done = run(HERE / "05_report.py", "--results", tmp_path)
    assert done.returncode == 0 and (tmp_path / "report.md").exists(), done.stderr


# ---- the bundled models ----------------------------------------------------------------------------------------------

@pytest.mark.parametrize("name", ["hybrid", "recurrent"])
def test_a_bundled_model_loads_like_any_checkpoint_is_small_and_knows_text(name):
    folder = HERE / "tiny" / name
    assert sum(path.stat().st_size for path in folder.iterdir() if "checkpoint" not in path.name) < 5_000_000
    net = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    assert type(net).__name__ == "Qwen3_5ForCausalLM" and net.dtype == torch.float32
    assert len(gdn.gdn_layers(net)) * net.config.linear_num_value_heads >= 12 and gdn.state_shape(net) == [64, 64]
    _, tokenizer, _ = gdn.load_model(f"tiny/{name}", "cpu")
    assert tokenizer.decode(tokenizer("def f(x):\n    return 12").input_ids) == "def f(x):\n    return 12"
    assert len(tokenizer("12345").input_ids) == 5
    _, _, ids = gdn.documents("stdlib", tokenizer, 1, 500)[0]
    with torch.no_grad():
        assert net(ids, labels=ids).loss < 5                                        # a uniform guess costs log 4096 = 8.3


def test_the_trainers_fast_functions_equal_transformers_forward_and_backward(monkeypatch):
    fast, ids = script("tiny/fast.py"), ids_of(77, rows=3)
    net = random_model("qwen3_5", linear_num_key_heads=4)        # no grouped heads: the bundled models have none

    def gradients():
        net.zero_grad()
        out = net(ids, labels=ids, use_cache=False)
        out.loss.backward()
        return [out.logits.detach(), *(p.grad.clone() for p in net.parameters())]
    want = gradients()
    for name in ("torch_chunk_gated_delta_rule", "causal_conv1d_fn"):
        monkeypatch.setattr(qwen, name, getattr(qwen, name))
    for name in ("Qwen3_5RMSNorm", "Qwen3_5RMSNormGated", "Qwen3_5MLP"):
        monkeypatch.setattr(getattr(qwen, name), "forward", getattr(qwen, name).forward)
    fast.patch()
    for a, b in zip(gradients(), want):
        torch.testing.assert_close(a, b, atol=2e-4 * b.abs().max().item(), rtol=0)


def test_the_trainer_asks_as_04_does_and_takes_the_remaining_common_words_in_any_order(tiny):
    train, tokenizer = script("tiny/train.py"), tiny[1]
    for task in train.TASKS:
        for length in (256, 512, 1024):
            ids, marks, right = train.task_sequence(task, length, Random(length), tokenizer)
            assert len(ids) == len(marks) <= length and ids[-1] == tokenizer.eos_token_id
            context, question, first = (tokenizer.decode(ids[marks == mark]) for mark in (0, 1, 2))
            assert context.startswith(ruler.make_sample(task, 512, 0, 0, tokenizer)[0]["prompt"].split("\n")[0])
            assert re.search(r"\? The .* (is|are)$", question) and first.split("<|endoftext|>")[0].strip() in context
            assert all(ids[position] in tokens for position, tokens in right.items())
            assert not right or len(right) == (marks >= 2).sum() - (ids == tokenizer.eos_token_id).sum()
    ids, marks, right = train.task_sequence("cwe", 512, Random(0), tokenizer)
    words = tokenizer.decode(ids[marks >= 2]).replace("<|endoftext|>", "").split()
    starts = [int((marks == mark).nonzero()[0]) for mark in range(2, 12)]
    assert len(words) == 10 and [right[start] for start in starts] == [
        [tokenizer(" " + word).input_ids[0] for word in words[n:]] for n in range(10)]
    assert words != sorted(words, key=tokenizer.decode(ids).split().index)                   # taught in no order at all


def test_the_trainers_loss_is_minus_log_of_the_probability_of_all_that_is_right():
    train, net = script("tiny/train.py"), random_model("qwen3_5")
    hidden, mask = torch.randn(1, 3, 32, generator=torch.Generator().manual_seed(0)), torch.tensor([[False, True, True]])
    p = torch.softmax(hidden[0, :2] @ net.lm_head.weight.T, -1)
    loss, hit = train.loss_at(net, hidden, torch.tensor([[[0, 0, 0], [7, 9, 7], [5, 5, 5]]]), mask)
    torch.testing.assert_close(loss, -torch.stack([p[0, 7] + p[0, 9], p[1, 5]]).log())
    loss, _ = train.loss_at(net, hidden, torch.tensor([[0, 7, 5]]), mask)                    # one right token: cross-entropy
    torch.testing.assert_close(loss, -torch.stack([p[0, 7], p[1, 5]]).log())
    best = p.argmax(-1)
    assert hit.tolist() == [best[0] in (7, 9), best[1] == 5]
    assert train.loss_at(net, hidden, torch.stack([best, best, best], 1)[None, [0, 0, 1]], mask)[1].all()


def test_the_trainer_lowers_the_loss_goes_on_where_it_was_and_writes_a_loadable_checkpoint(tmp_path):
    trainer = [sys.executable, HERE / "tiny" / "train.py", "--name", "recurrent", "--out", str(tmp_path), "--steps"]
    for steps in ("8", "20"):
        done = subprocess.run([*trainer, steps], capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stderr
    log = [json.loads(line) for line in (tmp_path / "train.jsonl").read_text().splitlines()]
    assert [line["step"] for line in log] == [8, 20] and log[1]["text"] < log[0]["text"] - 0.03
    net, _, layers = gdn.load_model(str(tmp_path), "cpu")
    assert layers == [1, 2, 3] and ruler.make_sample("vt", 512, 0, 0, gdn.load_tokenizer(str(tmp_path)))[1] <= 512
    assert (tmp_path / "config.json").read_text() == (HERE / "tiny" / "recurrent" / "config.json").read_text()

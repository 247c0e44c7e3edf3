"""Faster training of transformers' Qwen3_5ForCausalLM on a CPU, in float32: patch() replaces five of its functions.

Each computes what the original computes, forward and backward (test_gdn.py compares them), with far fewer passes over
memory: train.py does 1.6 times as many tokens a second. For training only: calls with a cache are left to the originals.

    B  batch   T  tokens   H  heads   K, V  key and value dimension   C  chunk   n  chunks   M = n B H
"""
import torch
import torch.nn.functional as F
import transformers.models.qwen3_5.modeling_qwen3_5 as qwen

CHUNK = 32


class DeltaRule(torch.autograd.Function):
    """The chunked gated delta rule: q (scaled), k [n, BH, C, K], v [n, BH, C, V], log decay g, b [n, BH, C] -> [n, BH, C, V].

    Within a chunk the corrections solve a triangular system (Yang, Wang, Zhang, Shen & Kim 2024, "Parallelizing Linear
    Transformers with the Delta Rule", section 3.2); one scan carries the state, here [K, V], from chunk to chunk.
    """

    @staticmethod
    def forward(ctx, q, k, v, g, b):
        n, BH, C, K = q.shape
        V, M = v.shape[-1], n * BH
        q, k, v, g, b = q.view(M, C, K), k.view(M, C, K), v.view(M, C, V), g.view(M, C), b.view(M, C, 1)
        c = g.cumsum(1)                                                     # log decay since the chunk began
        P = (c[:, :, None] - c[:, None, :]).clamp_(max=0).exp_().tril_()    # decay from token j to token i    [M, C, C]
        since = c.exp()[:, :, None]                                         # ... from the chunk's beginning   [M, C, 1]
        left = (c[:, -1:] - c).exp_()[:, :, None]                           # ... to its end                   [M, C, 1]
        whole = since[:, -1:].view(n, BH, 1, 1)
        A = torch.bmm(k, k.mT).mul_(P).mul_(b).tril_(-1)                    # the triangular system            [M, C, C]
        QK = torch.bmm(q, k.mT).mul_(P)                                     # attention within the chunk       [M, C, C]
        inverse = torch.linalg.solve_triangular(A, torch.eye(C).expand(M, C, C), upper=False,
                                                unitriangular=True).contiguous()
        right = torch.empty(M, C, V + K)
        torch.mul(v, b, out=right[:, :, :V])
        torch.mul(k, b * since, out=right[:, :, V:])
        UW = torch.bmm(inverse, right)                                      # u | w                            [M, C, V+K]
        k_left, q_since = k * left, q * since
        U, W = UW[:, :, :V].view(n, BH, C, V), UW[:, :, V:].view(n, BH, C, K)
        S, new = torch.zeros(n, BH, K, V), torch.empty(n, BH, C, V)         # the state before, and what is written
        for i in range(n):
            torch.baddbmm(U[i], W[i], S[i], alpha=-1, out=new[i])
            if i + 1 < n:
                torch.mul(S[i], whole[i], out=S[i + 1])
                S[i + 1].baddbmm_(k_left.view(n, BH, C, K)[i].mT, new[i])
        y = torch.bmm(q_since, S.view(M, K, V)).baddbmm_(QK, new.view(M, C, V))
        ctx.save_for_backward(q, k, v, b, P, since, left, A, QK, inverse, UW, k_left, q_since, S, new)
        return y.view(n, BH, C, V)

    @staticmethod
    def backward(ctx, dy):
        q, k, v, b, P, since, left, A, QK, inverse, UW, k_left, q_since, S, new = ctx.saved_tensors
        n, BH, K, V = S.shape
        M, C, _ = q.shape
        dy = dy.contiguous().view(M, C, V)
        whole, states, written = since[:, -1:].view(n, BH, 1, 1), S.view(M, K, V), new.view(M, C, V)
        # The scan, backwards: dS[i] is the gradient of the state after chunk i.
        dnew = torch.bmm(QK.mT, dy).view(n, BH, C, V)
        from_reads = torch.bmm(q_since.mT, dy).view(n, BH, K, V)
        dS = torch.zeros(n, BH, K, V)
        kl, W = k_left.view(n, BH, C, K), UW[:, :, V:].view(n, BH, C, K)
        for i in range(n - 1, -1, -1):
            if i + 1 < n:
                dnew[i].baddbmm_(kl[i], dS[i])
            if i:
                torch.addcmul(from_reads[i], dS[i], whole[i], out=dS[i - 1])
                dS[i - 1].baddbmm_(W[i].mT, dnew[i], alpha=-1)
        dnew, dS = dnew.view(M, C, V), dS.view(M, K, V)
        # The triangular system.
        dUW = torch.empty(M, C, V + K)
        dUW[:, :, :V] = dnew
        dUW[:, :, V:] = torch.bmm(dnew, states.mT).neg_()
        dright = torch.bmm(inverse.mT, dUW)
        dA = torch.bmm(dright, UW.mT).neg_().tril_(-1)
        dQK = torch.bmm(dy, written.mT)                                     # P is lower triangular: no mask is needed
        dright_v, dright_k = dright[:, :, :V], dright[:, :, V:]
        dk_left, dq_since = torch.bmm(written, dS.mT), torch.bmm(dy, states.mT)
        # The log decay, through every factor that holds it.
        inside = (dA * A).addcmul_(dQK, QK)
        through_k = (dright_k * k).sum(2).mul_(since[:, :, 0])
        at_end = (dk_left * k_left).sum(2)
        dc = inside.sum(2).sub_(inside.sum(1)).addcmul_(through_k, b[:, :, 0]).add_((dq_since * q_since).sum(2)).sub_(at_end)
        dc[:, -1] += at_end.sum(1) + (states * dS).sum((1, 2)) * since[:, -1, 0]
        dg = dc @ torch.ones(C, C).tril_()
        # b scales the rows of A and both halves of the right-hand side.
        dA.mul_(P)
        rows = torch.bmm(dA, k)
        db = (dright_v * v).sum(2).add_(through_k).add_((rows * k).sum(2))
        dA.mul_(b)
        dQK = dQK.mul_(P)
        dq = torch.bmm(dQK, k).addcmul_(dq_since, since)
        dk = torch.bmm(dQK.mT, q).baddbmm_(dA.mT, k)
        dk.addcmul_(rows, b).addcmul_(dk_left, left).addcmul_(dright_k, b * since)
        shape = (n, BH, C, -1)
        return dq.view(shape), dk.view(shape), (dright_v * b).view(shape), dg.view(n, BH, C), db.view(n, BH, C)


class Normalised(torch.autograd.Function):
    """x * scale / |x| over the last dimension."""

    @staticmethod
    def forward(ctx, x, scale):
        r = (x * x).sum(-1, keepdim=True).add_(1e-6).rsqrt_()
        y = x * (r * scale)
        ctx.save_for_backward(y, r)
        ctx.scale = scale
        return y

    @staticmethod
    def backward(ctx, dy):
        y, r = ctx.saved_tensors
        along = (dy * y).sum(-1, keepdim=True)
        return (dy * (r * ctx.scale)).addcmul_(y, along.mul_(r).div_(ctx.scale), value=-1), None


def chunk_gated_delta_rule(query, key, value, g, beta, initial_state=None, output_final_state=False, **kwargs):
    if initial_state is not None or output_final_state:
        return ORIGINAL_RULE(query, key, value, g=g, beta=beta, initial_state=initial_state,
                             output_final_state=output_final_state, **kwargs)
    B, T, H, K = query.shape
    n = -(-T // CHUNK)

    def chunks(x):                                                          # [B, T, H, ...] -> [n, BH, C, ...]
        x = F.pad(x, [0, 0] * (x.ndim - 2) + [0, n * CHUNK - T]).view(B, n, CHUNK, H, *x.shape[3:])
        return x.permute(1, 0, 3, 2, *range(4, x.ndim)).contiguous().view(n, B * H, CHUNK, *x.shape[4:])

    q, k, v, g, b = (chunks(x) for x in (query, key, value, g, beta))
    y = DeltaRule.apply(Normalised.apply(q, K ** -0.5), Normalised.apply(k, 1.0), v, g, b)
    return y.view(n, B, H, CHUNK, -1).permute(1, 0, 3, 2, 4).reshape(B, n * CHUNK, H, -1)[:, :T], None


class ConvSilu(torch.autograd.Function):
    """Causal depthwise convolution and silu: x [B, T, D], w [D, width]."""

    @staticmethod
    def forward(ctx, x, w):
        T, taps = x.shape[1], w.t().contiguous()                            # [width, D], the last for the token itself
        y = x * taps[-1]
        for back in range(1, len(taps)):
            y[:, back:].addcmul_(x[:, :T - back], taps[-1 - back])
        ctx.save_for_backward(x, taps, y)
        return F.silu(y)

    @staticmethod
    def backward(ctx, dout):
        x, taps, y = ctx.saved_tensors
        T, dy, dtaps = x.shape[1], torch.ops.aten.silu_backward(dout, y), torch.empty_like(taps)
        dx = dy * taps[-1]
        dtaps[-1] = (dy * x).sum((0, 1))
        for back in range(1, len(taps)):
            dx[:, :T - back].addcmul_(dy[:, back:], taps[-1 - back])
            dtaps[-1 - back] = (dy[:, back:] * x[:, :T - back]).sum((0, 1))
        return dx, dtaps.t()


def causal_conv1d(hidden_states, weight, bias=None, activation=None, **kwargs):
    return ConvSilu.apply(hidden_states.transpose(1, 2).contiguous(), weight).transpose(1, 2)


class RMSNorm(torch.autograd.Function):
    """x / rms(x) * w over the last dimension."""

    @staticmethod
    def forward(ctx, x, w, eps):
        r = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        unit = x * r
        ctx.save_for_backward(unit, r, w)
        return unit * w

    @staticmethod
    def backward(ctx, dy):
        unit, r, w = ctx.saved_tensors
        D = unit.shape[-1]
        t = dy * unit
        along = torch.mv(t.reshape(-1, D), w).view(r.shape).div_(-D)
        dw = t.reshape(-1, D).sum(0)
        return torch.mul(dy, w, out=t).addcmul_(unit, along).mul_(r), dw, None


class SiluMul(torch.autograd.Function):
    """silu(a) * b, with silu(a) computed again in the backward pass rather than kept."""

    @staticmethod
    def forward(ctx, a, b):
        ctx.save_for_backward(a, b)
        return F.silu(a).mul_(b)

    @staticmethod
    def backward(ctx, dy):
        a, b = ctx.saved_tensors
        return torch.ops.aten.silu_backward(dy * b, a), F.silu(a).mul_(dy)


ORIGINAL_RULE = qwen.torch_chunk_gated_delta_rule


def patch():
    qwen.torch_chunk_gated_delta_rule = chunk_gated_delta_rule
    qwen.causal_conv1d_fn = causal_conv1d
    qwen.Qwen3_5RMSNorm.forward = lambda self, x: RMSNorm.apply(x.contiguous(), 1.0 + self.weight, self.eps)
    qwen.Qwen3_5RMSNormGated.forward = lambda self, x, gate: SiluMul.apply(
        gate, RMSNorm.apply(x.contiguous(), self.weight, self.variance_epsilon))
    qwen.Qwen3_5MLP.forward = lambda self, x: self.down_proj(SiluMul.apply(self.gate_proj(x), self.up_proj(x)))

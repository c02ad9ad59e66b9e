"""Memory of draft training, by arithmetic: what one process holds at its peak, before anything runs.

Each `Part` is one kind of tensor with its size as a formula in numbers, and the phases of a training step in which it
is there; the peak is the fullest phase. The sizes follow the code: `eagle3.draft_layer`, `eagle3.ttt` and
`train.losses` for activations, DeepSpeed 0.19's `stage_1_and_2.py` and `stage3.py` for states, gradients and buckets.
`benchmarks/memory.py` holds the sum against the peak that the kernel measures, tests hold the activations against
what autograd really keeps.

Symbols of the formulas: P trained parameters, N rows of a micro-batch, R of them with a loss, K steps, H hidden size,
V and Vd target and draft vocabulary, C teacher rows of a block of logits, K draft rows for each.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from eagle3.draft_build import build_draft
from eagle3.draft_shape import DraftShape
from eagle3.errors import ConfigError
from train.losses import COLUMNS

FORWARD, BACKWARD, REDUCE, STEP = "loss", "backward", "gradient reduction", "optimizer step"
PHASES = (FORWARD, BACKWARD, REDUCE, STEP)
GIB = 2**30
# Projections of the joined word and state (`eagle3.draft_layer.JointLinear`), by the names of both kinds of draft.
WORD_READERS = ("q_proj", "k_proj", "v_proj", "q_a_proj", "kv_a_proj_with_mqa")


@dataclass(frozen=True)
class MemorySettings:
    """What the memory of one process depends on, beside the draft's shape.

    Args:
        steps: unrolled steps K.
        rows: rows N of the largest micro-batch of one process.
        world: processes in all, over all nodes.
        stage: ZeRO stage 0 to 3, as it runs.
        element: bytes of a weight in forward: 2 (bfloat16, float32 master weights) or 4 (float32).
        chunk: rows of draft logits of a block, `train.head_chunk`.
        asked: rows R that some loss reads; None = all.
        accumulation: micro-batches an optimizer step.
        recompute: activation checkpointing of each step.
        offload: master weights and moments are in the host's memory.
        bucket: elements of a gradient bucket.
        overlap: two buckets, one reduced while the other fills.
        outside: the teacher's logits are computed outside the draft's vocabulary too (`train.objective.outside`).
        cuda: on a GPU.
    """

    steps: int
    rows: int
    world: int = 1
    stage: int = 0
    element: int = 2
    chunk: int = 1024
    asked: int | None = None
    accumulation: int = 1
    recompute: bool = False
    offload: bool = False
    bucket: int = 500_000_000
    overlap: bool = True
    outside: bool = True
    cuda: bool = True


@dataclass(frozen=True)
class Part:
    """One kind of tensor: its bytes, how they come about, and the phases that see it."""

    name: str
    size: int
    formula: str
    phases: tuple[str, ...] = PHASES


@dataclass(frozen=True)
class MemoryPlan:
    """What one process holds.

    Args:
        parts: everything counted, biggest question first: states, then gradients, activations, temporaries.
        settings: what it was computed for.
        parameters: trained parameters in all.
        host: bytes in the host's memory for one process (an offloaded optimizer).
    """

    parts: tuple[Part, ...]
    settings: MemorySettings
    parameters: int
    host: int = 0

    def phase(self, name: str) -> int:
        """Bytes held in one phase."""
        return sum(part.size for part in self.parts if name in part.phases)

    @property
    def fullest(self) -> str:
        """The phase of the peak."""
        return max(PHASES, key=self.phase)

    @property
    def peak(self) -> int:
        """Bytes at the fullest phase."""
        return self.phase(self.fullest)


def trained_parameters(shape: DraftShape) -> dict[str, int]:
    """Elements of every trained parameter, by its served name; nothing is allocated."""
    with torch.device("meta"):
        draft = build_draft(shape)
    return {name: p.numel() for name, p in draft.named_parameters() if p.requires_grad}


def train_memory(shape: DraftShape, settings: MemorySettings) -> MemoryPlan:
    """Memory of one process training a draft of `shape`."""
    sizes = trained_parameters(shape)
    count = sum(sizes.values())
    parts = [
        *_states(shape, settings, count),
        *_gradients(shape, settings, sizes),
        *_activations(shape, settings),
        *_loss(shape, settings),
        *_step(shape, settings, sizes),
    ]
    host = 16 * _share(count, settings.world) + settings.element * max(sizes.values()) if settings.offload else 0
    return MemoryPlan(tuple(part for part in parts if part.size), settings, count, host)


def choose_stage(shape: DraftShape, settings: MemorySettings, limit: int) -> tuple[MemoryPlan, list[MemoryPlan]]:
    """The lowest ZeRO stage that fits, and the plans of all stages looked at.

    Args:
        shape: the draft.
        settings: `stage` is ignored.
        limit: bytes that one process may take.

    Raises:
        ConfigError: none fits; the line has the arithmetic of the best.
    """
    stages = (0, 1, 2, 3) if settings.element > 2 and not settings.offload else (1, 2, 3)
    plans = [train_memory(shape, replace(settings, stage=stage)) for stage in stages]
    for number, plan in enumerate(plans):
        if plan.peak <= limit:
            return plan, plans[: number + 1]
    best = min(plans, key=lambda plan: plan.peak)
    biggest = sorted((p for p in best.parts if best.fullest in p.phases), key=lambda p: -p.size)[:3]
    raise ConfigError(
        "training does not fit the memory at any ZeRO stage",
        where="train.zero_stage",
        why=f"stage {best.settings.stage} needs {best.peak / GIB:.2f} GiB a process of {limit / GIB:.2f}; most "
        + "; ".join(f"{p.name} {p.formula} = {p.size / GIB:.2f}" for p in biggest),
        mend="lower train.micro_batch_size or train.head_chunk, set train.activation_checkpointing=step or "
        "train.offload_optimizer=true, or take more GPUs",
        page="multi_node",
    )


def _share(count: int, world: int) -> int:
    return -(-count // world)


def _touched(sizes: dict[str, int], world: int) -> int:
    """Elements of all matrices that the fullest process owns a piece of: DeepSpeed keeps their gradients whole."""
    share, most = _share(sum(sizes.values()), world), 0
    for rank in range(world):
        first, last, place, own = rank * share, (rank + 1) * share, 0, 0
        for size in sizes.values():
            own += size if place < last and place + size > first else 0
            place += size
        most = max(most, own)
    return most


def _states(shape: DraftShape, s: MemorySettings, count: int) -> list[Part]:
    """Weights, master weights, moments, and the target's frozen ends (plain tensors, never partitioned).

    The ends count in the draft's dtype; in float32 they take half of that where they were saved in 16 bits
    (`train.tables`), which is not relied on.
    """
    share, b = _share(count, s.world), s.element
    table = shape.vocab_size * shape.hidden_size * b
    whole = f"P={count:,} x {b}"
    split = f"P/{s.world}={share:,}" if s.stage else f"P={count:,}"
    owned = share if s.stage else count
    parts = [Part("weights", count * b, whole)]
    if s.stage == 3:
        # Autograd keeps the gathered weights of a product until its backward, so the whole draft is there at once.
        parts.append(Part("weights, own share", share * b, f"{split} x {b}"))
    if s.stage and not s.offload:
        parts.append(Part("master weights, fp32", owned * 4, f"{split} x 4"))
    if not s.offload:
        parts.append(Part("Adam's two moments, fp32", owned * 8, f"{split} x 8"))
    ids = 9 * shape.vocab_size if shape.full_vocab else 8 * shape.draft_vocab_size + shape.vocab_size
    return [
        *parts,
        Part("frozen embedding", table, f"V={shape.vocab_size:,} x H={shape.hidden_size:,} x {b}"),
        Part("teacher's norm and head", table + shape.hidden_size * b, f"(V + 1) x H x {b}"),
        Part("d2t, t2d", ids, f"8 x Vd={shape.draft_vocab_size:,} + V"),
    ]


def _gradients(shape: DraftShape, s: MemorySettings, sizes: dict[str, int]) -> list[Part]:
    """Gradients in the weights' dtype, the buckets that reduce them, and the head's, which the loss takes at once.

    Autograd adds up the K steps' gradients of the layer in buffers of its own and hands them over once, at the end of
    backward: until then a micro-batch's gradients stand beside those of the micro-batches before it.
    """
    count, b = sum(sizes.values()), s.element
    share = _touched(sizes, s.world) if s.stage < 3 else _share(count, s.world)
    kept, name = (count, f"P={count:,}") if s.stage < 2 else (share, f"own share, whole matrices {share:,}")
    late = (STEP,) if s.stage == 0 else ()  # the other stages' optimizer step has a part of its own
    parts = []
    if s.accumulation > 1 or s.stage == 3:
        parts.append(Part("gradients", kept * b, f"{name} x {b}", (FORWARD, BACKWARD, REDUCE, *late)))
        parts.append(Part("gradients of this micro-batch", count * b, f"P={count:,} x {b}", (BACKWARD,)))
    else:
        after = (REDUCE,) if s.stage < 2 else ()
        parts.append(Part("gradients", count * b, f"P={count:,} x {b}", (BACKWARD, *after, *late)))
    if s.stage:
        parts += _buckets(s, count, share)
    head, wide = shape.draft_vocab_size * shape.hidden_size, max(4, b)
    parts.append(Part("head gradient, fp32", head * wide, f"Vd x H x {wide}", (FORWARD,)))
    if b < 4:
        parts.append(Part("head gradient, one step's", head * b, f"Vd x H x {b}", (FORWARD,)))
    return parts


def _buckets(s: MemorySettings, count: int, share: int) -> list[Part]:
    """Buffers of the reduction; a GPU allocates them whole when stages 2 and 3, or overlap, take the first gradient."""
    overlapping = s.overlap and s.cuda
    copies, moving, b = 2 if overlapping and s.stage < 3 else 1, min(s.bucket, count), s.element
    flying = moving if s.world > 1 else 0  # the copy that goes over the network
    parts = []
    if s.cuda and (s.stage > 1 or overlapping):
        parts.append(Part("buckets", copies * moving * b, f"{copies} x {moving:,} x {b}", (BACKWARD,)))
    filled = copies * moving + flying + (share if s.stage < 3 else 0)
    text = f"({copies} x {moving:,} + {flying:,} in flight + own share) x {b}"
    parts.append(Part("buckets, own gradients", filled * b, text, (REDUCE,)))
    return parts


def _activations(shape: DraftShape, s: MemorySettings) -> list[Part]:
    """What autograd keeps from forward until backward, and one step's temporaries in backward."""
    n, r, h, k, b = s.rows, _asked(s), shape.hidden_size, s.steps, s.element
    both = (FORWARD, BACKWARD)
    inputs = n * (shape.num_aux + 1) * h * b + n * 9
    first, later = step_bytes(shape, s, n, r), step_bytes(shape, s, r, r)
    fused = fuse_bytes(shape, s)
    ends, words = end_bytes(shape, s), word_bytes(shape, s)
    parts = [
        Part("micro-batch", inputs, f"N={n:,} x (A+1={shape.num_aux + 1}) x H x {b}"),
        *([Part("next micro-batch, copied meanwhile", inputs, "as much")] if s.cuda else []),
        Part("fc's input, norms", fused, f"N x {fused / n:,.0f}", both),
        Part("embeddings, norm", words, f"N x {words / n:,.0f}", both),
        Part("step outputs, norm", ends, f"K={k} x R={r:,} x {ends / (k * r):,.0f}", both),
    ]
    if s.recompute:
        kept = kept_bytes(shape, s, n, r) + (k - 1) * kept_bytes(shape, s, r, r)
        rule = f"N x {kept_bytes(shape, s, n, 0) / n:,.0f} + (K-1) x R x {kept_bytes(shape, s, r, r) / r:,.0f}"
        parts.append(Part("unrolled steps, kept", kept, rule, both))
        parts.append(Part("one step, recomputed", first, f"N=R={n:,} x {first / n:,.0f}", (BACKWARD,)))
    else:
        rule = f"{first:,} + (K-1={k - 1}) x R x {later / r:,.0f}"
        parts.append(Part("unrolled steps", first + (k - 1) * later, rule, both))
    wide = max(4, b)
    heads = shape.num_attention_heads * shape.head_dim
    passing = n * heads * 6 * b + r * heads * 4 * wide + 3 * r * shape.intermediate_size * b
    parts.append(
        Part("backward of one step", passing, f"N x Hq D={heads:,} x {6 * b + 4 * wide} + 3 R I x {b}", (BACKWARD,))
    )
    return parts


def _asked(s: MemorySettings) -> int:
    return s.rows if s.asked is None else s.asked


def _norm(s: MemorySettings, rows: int, width: int, input_kept: bool = False) -> int:
    """Bytes a norm keeps of `rows x width`, its output apart: its input, and one number a row (`eagle3.fused`)."""
    return (0 if input_kept else rows * width * s.element) + max(4, s.element) * rows


def word_bytes(shape: DraftShape, s: MemorySettings) -> int:
    """Bytes kept of the embedding's part of the projections: the embeddings, and their norm's output."""
    return _norm(s, s.rows, shape.hidden_size) + s.rows * shape.hidden_size * s.element


def step_bytes(shape: DraftShape, s: MemorySettings, n: int, r: int) -> int:
    """Bytes that one unrolled step keeps for backward.

    Args:
        shape: the draft.
        s: settings.
        n: rows that serve as keys: N at step 0, R later.
        r: rows that ask.
    """
    h, inner, b = shape.hidden_size, shape.intermediate_size, s.element
    total = _norm(s, n, h)  # over the state fed in
    total += n * h * b + (r * h * b if s.rows == n else 0)  # the norm's output, and its asking rows
    total += _attention_bytes(shape, s, n, r)
    total += _norm(s, r, h) + r * h * b  # after attention: input, output
    total += 2 * r * inner * b  # gate, up
    if shape.norm_output:
        total += _norm(s, r, h)
    return total


def _attention_bytes(shape: DraftShape, s: MemorySettings, n: int, r: int) -> int:
    heads, kv, d, dv, b = (
        shape.num_attention_heads,
        shape.num_key_value_heads,
        shape.head_dim,
        shape.value_dim,
        s.element,
    )
    turned = 2 * shape.rotary_dim * b * (n + (r if s.rows == n else 0))  # cos, sin; those of the asking rows
    common = turned + r * heads * (d + dv) * b + s.rows * heads * max(4, b)  # q, out, logsumexp
    if shape.kind != "mla":
        return common + n * kv * (d + dv) * b
    low_q, low_kv = shape.q_lora_rank, shape.kv_lora_rank
    total = common + _norm(s, r, low_q) + r * low_q * b
    total += _norm(s, n, low_kv) + n * low_kv * b
    if s.cuda or b >= 4:
        total += n * shape.qk_rope_head_dim * b  # the latent is kept as a view of the wider product
    return total + n * heads * (d + shape.qk_nope_head_dim + dv) * b  # keys; values as a view of keys and values


def fuse_bytes(shape: DraftShape, s: MemorySettings) -> int:
    """Bytes kept by what stands before the first step: `fc` reads the micro-batch itself, or its norms' output."""
    n, width, b = s.rows, shape.num_aux * shape.hidden_size, s.element
    total = 0
    if shape.norm_before_fc:
        total += _norm(s, n, width, input_kept=True) + n * width * b
    if shape.fc_norm:
        total += _norm(s, n, width, input_kept=True) + n * width * b
    return total


def kept_bytes(shape: DraftShape, s: MemorySettings, n: int, r: int) -> int:
    """Bytes of one step under recomputation: its input state, keys and values."""
    kv = shape.num_key_value_heads * (shape.head_dim + shape.value_dim)
    if shape.kind == "mla":
        kv += shape.num_attention_heads * shape.qk_nope_head_dim
    return n * (shape.hidden_size + kv) * s.element + n * 16


def end_bytes(shape: DraftShape, s: MemorySettings) -> int:
    """Bytes kept after the last step: all outputs joined, their norm, and the gradient that the loss took of them."""
    rows, h, b = s.steps * _asked(s), shape.hidden_size, s.element
    gradient = rows * h * b
    if shape.norm_output:
        return gradient
    return _norm(s, rows, h) + gradient


def _loss(shape: DraftShape, s: MemorySettings) -> list[Part]:
    """Temporaries of the loss, each block's memory being the next one's: `train.losses`."""
    b, wide = s.element, max(4, s.element)
    c, vd = min(max(1, s.chunk // s.steps), s.rows), shape.draft_vocab_size
    cell = wide + (0 if b == wide else b)  # a product in the weights' dtype beside its float32
    columns = max(vd, min(COLUMNS, shape.vocab_size - vd) if s.outside else 0)
    block = c * (columns * cell + vd * wide + s.steps * vd * cell)
    outputs = s.steps * _asked(s) * shape.hidden_size * b
    words = s.rows * _word_width(shape) * b
    return [
        Part("block of logits", block, f"C={c:,} x ({columns:,} x {cell} + Vd x {wide} + K Vd x {cell})", (FORWARD,)),
        Part("normed outputs", outputs, "K x R x H", (FORWARD,)),
        Part("words, projected", words, f"N x W={_word_width(shape):,} x {b}", (FORWARD,)),
    ]


def _word_width(shape: DraftShape) -> int:
    if shape.kind == "mla":
        return shape.q_lora_rank + shape.kv_lora_rank + shape.qk_rope_head_dim
    return (shape.num_attention_heads + 2 * shape.num_key_value_heads) * shape.head_dim


def _step(shape: DraftShape, s: MemorySettings, sizes: dict[str, int]) -> list[Part]:
    """Temporaries of the optimizer step: float32 gradients, the norm in double precision; AdamW is fused."""
    count, b = sum(sizes.values()), s.element
    if s.stage == 0:
        return []
    share, own = _share(count, s.world), _touched(sizes, s.world) if s.stage < 3 else _share(count, s.world)
    largest = min(share, max(sizes.values()))
    if s.offload:
        return [Part("own gradients", own * b, f"{own:,} x {b}", (STEP,))]
    ways = {
        f"fp64 norm: 8 x {largest:,} + {b} x {own:,}": 8 * largest + own * b,
        f"fp32 gradients: (4 + {b}) x P/{s.world} + {b} x {own:,}": share * ((4 if b < 4 else 0) + b) + own * b,
        f"AdamW: P/{s.world} x 4": share * 4,
    }
    text = max(ways, key=lambda name: ways[name])
    return [Part("optimizer's temporaries", ways[text], text, (STEP,))]

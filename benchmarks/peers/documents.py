"""Random weights and documents of a case, peaked like those of a trained model, in one file that every side reads."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

from benchmarks.peers.cases import Case, to_json
from eagle3.draft import Eagle3Draft
from eagle3.ttt import PackedBatch
from train.losses import TeacherHead, supervised_counts

# Of every 38th document of the demo's prepared training set, in order of length: tokens beside those of the longest
# document, and the share of them that is to be learnt.
DEMO = (
    *((0.35, 0.47), (0.48, 0.61), (0.61, 0.68), (0.72, 0.78), (0.75, 0.77), (0.75, 0.77), (0.76, 0.76), (0.76, 0.76)),
    *((0.76, 0.76), (0.77, 0.75), (0.77, 0.75), (0.77, 0.75), (0.78, 0.75), (0.78, 0.74), (0.78, 0.74), (0.79, 0.73)),
)
HEAD_SCALE = 2.0  # norm of a row of the planted head
TEACHER_LOGIT, DRAFT_LOGIT = 15.0, 12.0  # mean logit of the true next token; others are N(0, HEAD_SCALE ** 2)
LOGIT_SPREAD = 4.0
IN_VOCABULARY = 0.96  # tokens that the draft's vocabulary knows


@dataclass(frozen=True)
class Documents:
    """The data of a batch, documents end to end, N tokens in all.

    Args:
        lengths: tokens T of each document; their sum is N.
        input_ids: `[N]` int64.
        aux: `[N, 3 * H]` the target's aux states after reading each token.
        final: `[N, H]` its final state, before the final norm.
        loss_mask: `[N]` bool; at token t of a document, whether token t + 2 is to be learnt (by row t of its rows).
            False on the first K tokens, on the last two, and where the teacher's best token is unknown to the draft:
            on such rows the tools differ in what they train on.
    """

    lengths: list[int]
    input_ids: Tensor
    aux: Tensor
    final: Tensor
    loss_mask: Tensor

    def packed(self) -> PackedBatch:
        """The rows that Redraft trains on: T - 1 of each document."""
        columns = (self.input_ids, self.aux, self.final, self.loss_mask)
        parts = list(zip(*(x.split(self.lengths) for x in columns), strict=True))
        return PackedBatch(
            features=torch.cat([aux[:-1] for _, aux, _, _ in parts]),
            token_ids=torch.cat([ids[1:] for ids, _, _, _ in parts]),
            teacher=torch.cat([final[1:] for _, _, final, _ in parts]),
            loss_mask=torch.cat([mask[:-1] for _, _, _, mask in parts]),
            doc_lengths=[len(ids) - 1 for ids, _, _, _ in parts],
        )


def draw_lengths(case: Case, random: torch.Generator) -> list[tuple[int, float]]:
    """Documents of a batch, `(tokens, share to be learnt)`: each group of them adds up to `case.length` tokens."""
    drawn: list[tuple[int, float]] = []
    shortest = 4 * case.steps + 4
    for _ in range(case.sequences):
        left = case.length
        while left:
            relative, share = DEMO[int(torch.randint(len(DEMO), (1,), generator=random))]
            tokens = min(left, round(relative * case.length)) if case.lengths == "mixed" else left
            tokens = left if left - tokens < shortest else tokens  # a rest too short for a document of its own
            drawn.append((tokens, case.share or share))
            left -= tokens
    return drawn


def draw_mask(documents: list[tuple[int, float]], steps: int) -> Tensor:
    """`[N]` bool: the last tokens of each document, as an answer follows its prompt; see `Documents.loss_mask`."""
    masks = []
    for tokens, share in documents:
        mask = torch.zeros(tokens, dtype=torch.bool)
        mask[max(steps, tokens - 2 - round(share * tokens)) : tokens - 2] = True
        masks.append(mask)
    return torch.cat(masks)


def planted(rows: Tensor, mean: float, random: torch.Generator) -> Tensor:
    """States `[n, H]` of norm sqrt(H) whose product with their own `rows [n, H]` of the head is around `mean`."""
    width = rows.shape[1]
    wanted = (mean + LOGIT_SPREAD * torch.randn(len(rows), generator=random)).clamp(min=2.0)  # [n]
    cosine = (wanted / (HEAD_SCALE * math.sqrt(width))).clamp(max=0.95)[:, None]
    noise = F.normalize(torch.randn(rows.shape, generator=random), dim=-1)
    return (cosine * F.normalize(rows, dim=-1) + (1 - cosine**2).sqrt() * noise) * math.sqrt(width)


def saved(table: Tensor) -> Tensor:
    """The values that a target's checkpoint has for `table`: targets are saved in bfloat16."""
    return table.bfloat16().float()


def draw(case: Case) -> tuple[Eagle3Draft, TeacherHead, Documents]:
    """The draft, the target's end and the documents of a case, float32; the same seed gives the same numbers."""
    random = torch.Generator().manual_seed(case.seed)
    head = saved(torch.randn(case.vocab, case.hidden, generator=random) * (HEAD_SCALE / math.sqrt(case.hidden)))
    known = torch.randperm(case.vocab, generator=random)[: case.draft_vocab].sort().values  # [Vd] target ids
    draft = _draft(case, head, known, random)
    sizes = draw_lengths(case, random)
    ids = _tokens(case, known, random)
    ahead = torch.cat((ids[1:], ids[:1])), torch.cat((ids[2:], ids[:2]))  # the last ones of a document teach nothing
    aux = torch.randn(case.tokens, 3 * case.hidden, generator=random)
    aux[:, -case.hidden :] = planted(head[ahead[1]], DRAFT_LOGIT, random)
    teacher = TeacherHead(1 + 0.05 * torch.randn(case.hidden, generator=random), head, case.shape().rms_norm_eps)
    final = planted(head[ahead[0]], TEACHER_LOGIT, random) * (1 + torch.rand(case.tokens, 1, generator=random))
    documents = Documents([n for n, _ in sizes], ids, aux, final, draw_mask(sizes, case.steps))
    return draft, teacher, _without_unknown(documents, draft, teacher)


def _draft(case: Case, head: Tensor, known: Tensor, random: torch.Generator) -> Eagle3Draft:
    """As after some training: `fc` passes the last aux state on, the head is the target's, the layer adds to it."""
    draft = Eagle3Draft(case.shape())
    with torch.no_grad():
        for name, parameter in draft.named_parameters():
            if name.endswith("norm.weight"):
                parameter.copy_(1 + 0.05 * torch.randn(parameter.shape, generator=random))
            else:
                parameter.copy_(torch.randn(parameter.shape, generator=random) * (0.5 / math.sqrt(parameter.shape[-1])))
        draft.fc.weight *= 0.2
        draft.fc.weight[:, -case.hidden :] += torch.eye(case.hidden)
        draft.lm_head.weight.copy_(head[known])
        draft.embed_tokens.weight.copy_(saved(torch.randn(head.shape, generator=random)))
        draft.d2t.copy_(known - torch.arange(len(known)))
        draft.t2d.zero_()
        draft.t2d[known] = True
    return draft


def _tokens(case: Case, known: Tensor, random: torch.Generator) -> Tensor:
    """`[N]` int64, most of them known to the draft."""
    inside = known[torch.randint(len(known), (case.tokens,), generator=random)]
    anywhere = torch.randint(case.vocab, (case.tokens,), generator=random)
    return torch.where(torch.rand(case.tokens, generator=random) < IN_VOCABULARY, inside, anywhere)


def _without_unknown(documents: Documents, draft: Eagle3Draft, teacher: TeacherHead) -> Documents:
    """Leave out the rows whose teacher's best token the draft cannot say: the tools differ there in what they do."""
    taught_by = torch.cat((documents.final[1:], documents.final[:1]))  # row t: the state after token t + 1
    best = torch.cat([teacher.logits(block).argmax(-1) for block in taught_by.split(256)])
    mask = documents.loss_mask & draft.t2d[best]
    return Documents(documents.lengths, documents.input_ids, documents.aux, documents.final, mask)


def teacher_entropy(documents: Documents, draft: Eagle3Draft, teacher: TeacherHead, steps: int) -> list[float]:
    """Sum over the supervised rows of each step of the teacher's entropy within the draft's vocabulary, nats, `[K]`.

    Cross entropy is the divergence plus this.
    """
    batch = documents.packed()
    ids = draft.to_target_ids(torch.arange(draft.shape.draft_vocab_size))
    entropy = []
    for block in batch.teacher.split(256):
        log_p = teacher.logits(block)[:, ids].log_softmax(-1)
        entropy.append(-(log_p.exp() * log_p).sum(-1))
    whole, supervised = torch.cat(entropy).double(), batch.supervised(steps)  # [N], [N, K]
    return [float(whole[k:][supervised[: batch.rows - k, k]].sum()) for k in range(steps)]


@dataclass(frozen=True)
class CaseFiles:
    """A case on disk, and what the check needs to know of it.

    Args:
        folder: holds `case.json`, `weights.safetensors`, `data.safetensors` and `target/config.json`.
        counts: supervised rows of each step, `[K]`.
        entropy: see `teacher_entropy`.
        lengths: tokens of each document.
    """

    folder: Path
    counts: list[int]
    entropy: list[float]
    lengths: list[int]


def write_case(case: Case, folder: Path) -> CaseFiles:
    """Draw a case and write it for the workers.

    Weights bear the served folder's names behind `draft.`, the target's own are `target.norm.weight` and
    `target.lm_head.weight`; the data are the fields of `Documents`, and `final_normed` for who stores it so.
    """
    draft, teacher, documents = draw(case)
    folder.mkdir(parents=True, exist_ok=True)
    weights = {f"draft.{name}": tensor.detach() for name, tensor in draft.state_dict().items()}
    weights |= {"target.norm.weight": teacher.norm_weight, "target.lm_head.weight": teacher.head}
    save_file({name: tensor.contiguous() for name, tensor in weights.items()}, folder / "weights.safetensors")
    data = {
        "input_ids": documents.input_ids,
        "aux": documents.aux,
        "final": documents.final,
        "final_normed": F.rms_norm(documents.final, (case.hidden,), teacher.norm_weight, teacher.eps),
        "loss_mask": documents.loss_mask,
    }
    save_file(data, folder / "data.safetensors")
    (folder / "case.json").write_text(json.dumps({**to_json(case), "lengths": documents.lengths}))
    counts = supervised_counts(documents.packed(), case.steps).tolist()
    return CaseFiles(folder, counts, teacher_entropy(documents, draft, teacher, case.steps), documents.lengths)

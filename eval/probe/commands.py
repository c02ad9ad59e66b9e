"""The probes as commands: parsed arguments in, a verdict out."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from eagle3.atomic import read_json
from eagle3.checkpoint import served_wiring
from eagle3.conventions import Shape
from eagle3.errors import ConfigError, WiringError
from eagle3.hf_model import choose_device, choose_dtype, load_target
from eagle3.hf_states import all_site_states
from eagle3.target_identity import TargetIdentity
from eagle3.target_weights import TargetWeights
from eagle3.wiring import Site, Wiring
from eval.probe.draft import candidates_for, judge_draft, load_subject, score_candidates
from eval.probe.dump import Dump, load_dump, save_dump
from eval.probe.expected import Expected, expected_of_folder, parse_wiring, sglang_ids
from eval.probe.live import Fed, ask, judge_live, refuse_other_ids
from eval.probe.prompts import random_prompts, text_prompts
from eval.probe.ranks import compare_ranks
from eval.probe.scoring import TargetEnd
from eval.probe.server import Answer, ProbeServer, ServerFacts
from eval.probe.static import probe_static, with_folder
from eval.probe.store import judge_store, target_note
from eval.probe.stored import StoreReader
from eval.probe.texts import read_store, run_prompts, run_store
from eval.probe.verdict import Verdict


def run_static(args: argparse.Namespace) -> Verdict:
    """`static`: an SGLang tree, read without starting it."""
    wiring, model_type = _static_wiring(args)
    if not model_type:
        raise ConfigError("no model type is known", where="--model-type", mend="give it, or --draft or --target")
    verdict = probe_static(args.tree, model_type, args.architecture, wiring, cuda_graphs=not args.disable_cuda_graph)
    if args.draft is None or wiring is None:
        return verdict
    return with_folder(verdict, sglang_ids(read_json(args.draft / "config.json")), wiring)


def _static_wiring(args: argparse.Namespace) -> tuple[Wiring | None, str]:
    """What the tree should feed, and the target's model type."""
    if args.draft and args.wiring:
        raise ConfigError("two expectations", where="--draft, --wiring", mend="give one of them")
    if args.draft:
        config = read_json(args.draft / "config.json", mend="give a served folder")
        wiring = served_wiring(config, str(args.draft))
        if wiring is None:
            raise ConfigError(
                "the draft names no wiring", where=str(args.draft), mend="name it with --wiring, or find it with draft"
            )
        return wiring, args.model_type or wiring.model_type
    if args.target:
        one = TargetWeights(args.target).identity()
        shape = Shape(args.model_type or one.model_type, one.num_layers, one.hidden_size)
    else:
        shape = Shape(args.model_type, args.num_layers, 1)  # the width plays no part in ids
    if not args.wiring:
        return None, shape.model_type
    if not shape.num_layers:
        raise ConfigError("the target's depth is not known", where="--num-layers", mend="give it, or --target FOLDER")
    return parse_wiring(args.wiring, shape), shape.model_type


def run_live(args: argparse.Namespace) -> Verdict:
    """`live`: a running server against the target."""
    weights = TargetWeights(args.target)
    shape = weights.identity()
    server = ProbeServer(args.url, args.timeout)
    facts = server.facts()
    expected = _expected(args, shape, facts)
    facts.refuse_without_aux(expected.ids)
    refused = refuse_other_ids(facts, expected)
    if refused is not None:
        return refused
    source = _Source(args, weights)
    answers, mixed = ask(server, facts, source.prompts, shape.hidden_size, args.new_tokens)
    if args.save:
        prompts, rows = [torch.tensor(ids) for ids in source.prompts], [one.rows for one in answers]
        save_dump(args.save, Dump(facts.url, facts.ranks, facts.version, shape.hidden_size, prompts, rows))
    fed = source.beside(answers)
    like = _any_wiring(shape)
    verdict = judge_live(facts, fed, expected, like)
    return _also(verdict, mixed, "send requests one by one until a build is found that keeps them apart")


def run_store_probe(args: argparse.Namespace) -> Verdict:
    """`store`: a hidden-state store against the target."""
    reader = StoreReader(args.store)
    note = target_note(reader, TargetWeights(args.target).identity().to_dict())
    records = list(reader.spread(args.records, args.max_tokens))
    model = _model(args)
    references = [reader.as_kept(all_site_states(model, record.input_ids)) for record in records]
    verdict = judge_store(reader, records, references)
    return Verdict(**{**vars(verdict), "reasons": [*verdict.reasons, *note]})


def run_draft(args: argparse.Namespace) -> Verdict:
    """`draft`: a draft's accuracy under every candidate wiring."""
    weights = TargetWeights(args.target)
    shape = weights.identity()
    device = choose_device(args.device)
    subject = load_subject(args.draft, weights, device)
    expect = parse_wiring(args.expect, shape) if args.expect else None
    _check_target(subject.claimed, shape, subject.where)
    all_of = [Site.parse(part) for part in args.all_of.split(",")] if args.all_of else []
    candidates = candidates_for(subject, shape, expect, all_of)
    reader = StoreReader(args.store) if args.store else None
    if args.stored_states:
        if reader is None:
            raise ConfigError("no store is given", where="--stored-states", mend="add --store FOLDER")
        held = [*reader.wiring.stored_sites, Site(0)]
        candidates = candidates.within(held)
        texts = read_store(reader, weights.embedding(), args.records, args.max_tokens, args.steps + 2)
    else:
        model = _model(args, with_head=reader is None)
        names = [site.name for site in candidates.sites]
        if reader is not None:
            texts = run_store(reader, model, names, args.records, args.max_tokens, args.steps + 2)
        else:
            texts = run_prompts(
                args.target, model, names, args.prompts, args.records, args.max_tokens, args.trust_remote_code
            )
    normed = args.stored_states and reader is not None and reader.wiring.teacher == "final_normed"
    scores = score_candidates(subject, candidates, texts, TargetEnd.read(weights, device, normed), args.steps)
    return judge_draft(scores, expect or subject.claimed, args.top)


def run_ranks(args: argparse.Namespace) -> Verdict:
    """`ranks`: two servers, or two dumps of `live --save`, with the same prompts."""
    sides: list[Dump] = [load_dump(path) for path in args.dump]
    if len(sides) + len(args.url) != 2:
        raise ConfigError(
            "two sides are compared",
            where="--dump, --url",
            why=f"{len(sides) + len(args.url)} are given",
            mend="give two of --dump FILE and --url ADDRESS",
        )
    if args.url and not sides and args.target is None:
        raise ConfigError(
            "two servers are asked with the target's tokens", where="--target", mend="add --target FOLDER"
        )
    for url in args.url:
        sides.append(_ask_side(args, url, sides[0] if sides else None))
    return compare_ranks(*sides)


def _ask_side(args: argparse.Namespace, url: str, like: Dump | None) -> Dump:
    """A server's states on the prompts of `like`, or on the target's."""
    server = ProbeServer(url, args.timeout)
    facts = server.facts()
    facts.refuse_without_aux()
    if like is not None:
        prompts, width = [ids.tolist() for ids in like.prompts], like.hidden_size
    else:
        weights = TargetWeights(args.target)
        prompts, width = _prompts(args, weights), weights.hidden_size
    answers, _ = ask(server, facts, prompts, width)
    rows = [one.rows for one in answers]
    return Dump(url, facts.ranks, facts.version, width, [torch.tensor(ids) for ids in prompts], rows)


def _expected(args: argparse.Namespace, shape: TargetIdentity, facts: ServerFacts) -> Expected:
    if args.draft and args.wiring:
        raise ConfigError("two expectations", where="--draft, --wiring", mend="give one of them")
    if args.draft:
        expected = expected_of_folder(args.draft, shape, facts.convention())
        _check_target(expected.wiring, shape, str(args.draft))
        return expected
    if args.wiring:
        return Expected(parse_wiring(args.wiring, shape), f"--wiring {args.wiring}")
    return Expected(None, "neither --draft nor --wiring is given")


def _check_target(wiring: Wiring | None, shape: TargetIdentity, where: str) -> None:
    """Refuse a draft that was trained for a target of another depth or width."""
    if wiring is not None and (wiring.num_layers, wiring.hidden_size) != (shape.num_layers, shape.hidden_size):
        raise WiringError(
            "the draft is for another target",
            where=where,
            why=f"{wiring.num_layers} layers of width {wiring.hidden_size}; --target has {shape.num_layers} of "
            f"{shape.hidden_size}",
            mend="give the target that the draft was trained for",
        )


class _Source:
    """The live probe's prompts, and the target's own states beside the server's: its run, or a store's records."""

    def __init__(self, args: argparse.Namespace, weights: TargetWeights) -> None:
        self._args = args
        self._stored: list[dict[str, Tensor]] | None = None
        if args.store is None:
            self.prompts = _prompts(args, weights)
            return
        reader = StoreReader(args.store)
        table = weights.embedding()
        records = list(reader.spread(args.prompts, args.max_tokens))
        self.prompts = [record.input_ids.tolist() for record in records]
        self._stored = [
            {name if name != "final" else reader.wiring.teacher: state.float() for name, state in one.states.items()}
            | {"embedding": table[one.input_ids].float()}
            for one in records
        ]

    def beside(self, answers: list[Answer]) -> list[Fed]:
        """Pair the server's answers with the target's states; a store has none for generated tokens."""
        if self._stored is not None:
            return [Fed(one, _by_depth(states)) for one, states in zip(answers, self._stored, strict=True)]
        model = _model(self._args)
        return [
            Fed(one, all_site_states(model, [*ids, *one.output_ids[:-1]]))
            for ids, one in zip(self.prompts, answers, strict=True)
        ]


def _by_depth(states: dict[str, Tensor]) -> dict[str, Tensor]:
    """Sites in layer order, the teacher last."""
    layers = sorted((name for name in states if not name.startswith("final")), key=lambda name: Site.parse(name).layer)
    return {name: states[name] for name in [*layers, *(name for name in states if name.startswith("final"))]}


def _prompts(args: argparse.Namespace, weights: TargetWeights) -> list[list[int]]:
    if args.random_tokens:
        return random_prompts(weights.vocab_size, args.prompts, args.max_tokens)
    return text_prompts(args.target, args.prompts, args.max_tokens, args.trust_remote_code)


def _model(args: argparse.Namespace, with_head: bool = False) -> nn.Module:
    device = choose_device(args.device)
    dtype = choose_dtype(args.dtype, device)
    return load_target(Path(args.target), device, dtype, args.trust_remote_code, with_head)


def _any_wiring(shape: TargetIdentity) -> Wiring:
    """A wiring that only carries the target's shape."""
    return Wiring((Site(0),), "final", shape.model_type, shape.num_layers, shape.hidden_size)


def _also(verdict: Verdict, findings: list[str], mend: str) -> Verdict:
    """A verdict with a further fault, which makes it a disagreement."""
    if not findings:
        return verdict
    fields: dict[str, Any] = {**vars(verdict), "ok": False, "told": True}
    fields["reasons"] = [*findings, *verdict.reasons]
    fields["mend"] = verdict.mend or mend
    if verdict.ok:
        fields["what"] = "the slots are right and requests are mixed up"
    return Verdict(**fields)

"""The comparison with other tools: its cases, its protocol, what it refuses to time, and its arithmetic."""

from __future__ import annotations

import ast
import io
import json
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file

from benchmarks.peers import documents as drawn
from benchmarks.peers.__main__ import cases, parse
from benchmarks.peers.agreement import compare, mean_losses
from benchmarks.peers.cases import CHOSEN, DRAFT_VOCAB, HIDDEN, LENGTHS, STEPS, Case, grid
from benchmarks.peers.measure import Budget, measure, ratios
from benchmarks.peers.protocol import SideFailed, Worker
from benchmarks.peers.serving import CaseReader, fingerprint
from benchmarks.peers.sides import OURS, SideSpec, open_sides
from benchmarks.peers.table import as_table, profile_lines
from eagle3.errors import ConfigError
from train.losses import step_weights, supervised_counts, ttt_loss

TINY = Case(hidden=64, draft_vocab=96, length=60, steps=3, vocab=200)
ROOT = Path(__file__).resolve().parents[3]


def test_the_chosen_cells_have_every_value_and_the_grid_has_24() -> None:
    for number, known in enumerate((HIDDEN, DRAFT_VOCAB, LENGTHS, STEPS)):
        assert {cell[number] for cell in CHOSEN} == set(known)
    everything = grid((None,) * 4, full=True)
    assert len(set(everything)) == 24 and set(CHOSEN) < set(everything)


def test_cells_are_restricted_to_the_values_asked_for() -> None:
    assert grid((None,) * 4, full=False) == list(CHOSEN)
    assert grid((None, None, [2048], [7]), full=False) == [c for c in CHOSEN if c[2:] == (2048, 7)]
    assert len(grid(([2048], None, None, [3]), full=True)) == 4
    assert grid(([576, 1024], [8192], [512], [7]), full=False) == [(576, 8192, 512, 7), (1024, 8192, 512, 7)]
    assert grid(([128], None, None, None), full=False) == [(128, 8192, 512, 3)]


def test_the_command_line_makes_cases() -> None:
    args = parse(["--hidden", "576", "--length", "2048", "--share", "1", "--lengths", "full", "--sequences", "2"])
    (case,) = cases(args, "float32")
    assert (case.hidden, case.length, case.steps, case.share, case.tokens) == (576, 2048, 7, 1.0, 4096)
    with pytest.raises(ConfigError, match="--share"):
        cases(parse(["--share", "1.5"]), "float32")


@pytest.mark.parametrize("lengths", ["mixed", "full"])
def test_documents_fill_each_group_and_are_supervised_at_their_ends(lengths: str) -> None:
    case = replace(TINY, length=400, sequences=3, lengths=lengths)
    sizes = drawn.draw_lengths(case, torch.Generator().manual_seed(5))
    assert sum(n for n, _ in sizes) == 1200 and all(16 <= n <= 400 for n, _ in sizes)
    assert (len(sizes) == 3) == (lengths == "full")
    for (tokens, share), mask in zip(
        sizes, drawn.draw_mask(sizes, case.steps).split([n for n, _ in sizes]), strict=True
    ):
        assert not mask[: case.steps].any() and not mask[-2:].any()
        assert int(mask.sum()) == min(round(share * tokens), tokens - 2 - case.steps)
        assert mask[tokens - 2 - int(mask.sum()) : tokens - 2].all()


def test_everything_is_learnt_with_share_one() -> None:
    sizes = drawn.draw_lengths(replace(TINY, share=1.0), torch.Generator().manual_seed(0))
    assert int(drawn.draw_mask(sizes, 3).sum()) == 60 - 5 * len(sizes)


def taught(case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    """Entropy within the draft's vocabulary and best token of each teacher row, `[N]`."""
    draft, teacher, documents = drawn.draw(case)
    logits = teacher.logits(documents.packed().teacher)
    probs = logits[:, draft.to_target_ids(torch.arange(case.draft_vocab))].softmax(-1)
    return torch.distributions.Categorical(probs).entropy(), logits.argmax(-1)


def test_drawn_states_are_peaked_and_never_teach_what_the_draft_cannot_say() -> None:
    case = replace(TINY, hidden=512, length=300)
    draft, _, documents = drawn.draw(case)
    entropy, best = taught(case)
    mask = documents.packed().loss_mask
    assert draft.t2d[best[mask]].all() and not draft.t2d[best].all()
    assert 0.05 < float(entropy.mean()) < 3.0
    again = drawn.draw(case)[2]
    assert torch.equal(again.final, documents.final) and torch.equal(again.loss_mask, documents.loss_mask)
    other = drawn.draw(replace(case, seed=1))[2]
    assert not torch.equal(other.final, documents.final)


def test_a_divergence_and_the_entropy_make_the_cross_entropy(tmp_path: Path) -> None:
    files = drawn.write_case(TINY, tmp_path)
    draft, teacher, documents = drawn.draw(TINY)
    batch = documents.packed()
    weights = step_weights(supervised_counts(batch, 3), 0.8)
    sums = ttt_loss(draft, batch, teacher, weights).sums
    divergence = [float(s) - e for s, e in zip(sums, files.entropy, strict=True)]
    assert min(divergence) > 0
    got = mean_losses({"kind": "kl", "sums": divergence}, files)
    assert got == pytest.approx([float(s) / c for s, c in zip(sums, files.counts, strict=True)])
    assert mean_losses({"kind": "ce", "sums": sums.tolist()}, files) == pytest.approx(got)


def test_the_entropy_is_that_of_the_rows_each_step_teaches() -> None:
    draft, teacher, documents = drawn.draw(TINY)
    entropy, _ = taught(TINY)
    supervised = documents.packed().supervised(3)
    for k, total in enumerate(drawn.teacher_entropy(documents, draft, teacher, 3)):
        rows = supervised[:, k].nonzero()[:, 0]
        assert total == pytest.approx(float(entropy[rows + k].sum()), rel=1e-5)


def test_every_weight_of_a_case_must_be_accounted_for(tmp_path: Path) -> None:
    drawn.write_case(TINY, tmp_path)
    reader = CaseReader(tmp_path)
    names = {name: name for name in reader.names()}
    assert "draft.midlayer.self_attn.q_proj.weight" in names and "target.norm.weight" in names
    assert reader.weights(names).keys() == names.keys()
    missing = {name: name for name in names if name != "draft.fc.weight"}
    with pytest.raises(KeyError, match=r"draft\.fc\.weight"):
        reader.weights(missing)
    assert len(reader.weights(missing, ("draft.fc.weight",))) == len(names) - 1
    with pytest.raises(KeyError, match="invented"):
        reader.weights({**names, "invented": "x"})


FAKE = """
import json, os, sys, time
answers, name, log = os.fdopen(int(os.environ["PEERS_ANSWERS"]), "w"), sys.argv[1], open(sys.argv[2], "a")
told = json.loads(os.environ["PEERS_SETTINGS"])
print("chatter on stdout")
for line in sys.stdin:
    request = json.loads(line)
    op = request["op"]
    print(name, op, os.environ["OMP_NUM_THREADS"], file=log, flush=True)
    answer = {"ok": True}
    if op == told.get("dies_at"):
        print("the end", file=sys.stderr, flush=True)
        os._exit(3)
    if op == told.get("fails_at"):
        answer = {"ok": False, "error": "ValueError: no"}
    if op == told.get("sleeps_at"):
        time.sleep(60)
    if op == told.get("babbles_at"):
        answers.write("what?\\n")
        answers.flush()
        continue
    if op == "memory":
        answer |= {"now": 10.0, "peak": told.get("peak", 100.0), "baseline": 5.0}
    if op == "step":
        answer |= {"seconds": told.get("seconds", 1.0), "loss": 1.0}
    if op == "profile":
        answer |= {"total": 4.0, "operators": [{"op": "aten::mm", "seconds": 3.0, "calls": request["rows"]}]}
    if op == "loss":
        answer |= {"kind": "ce", "sums": [told.get("sum", 3.0)] * 3}
    if op == "gradients":
        answer |= {"gradients": {"w": {"norm": told.get("norm", 1.0), "sample": [1.0, 2.0]}}, "factors": [[1.0] * 3]}
    answers.write(json.dumps(answer) + "\\n")
    answers.flush()
"""


@dataclass(frozen=True)
class FakeSide(SideSpec):
    """A side whose worker is the script above."""

    script: Path = Path()

    def command(self, case_folder: Path) -> list[str]:
        return [str(self.python), str(self.script), self.name, str(self.script.parent / "asked.log")]


def fake(folder: Path, name: str, **settings: Any) -> FakeSide:
    script = folder / "fake.py"
    script.write_text(FAKE)
    return FakeSide(name, Path(sys.executable), settings, script=script)


def fake_worker(folder: Path, limit_s: float = 30, **settings: Any) -> Worker:
    side = fake(folder, "peer", **settings)
    return Worker("peer", side.command(folder), settings, 1, folder / "log", limit_s)


def test_a_worker_answers_and_ends_with_its_input(tmp_path: Path) -> None:
    with fake_worker(tmp_path) as worker:
        assert worker.ask("memory") == {"now": 10.0, "peak": 100.0, "baseline": 5.0}
        assert worker.ask("step")["seconds"] == 1.0
    assert "chatter" in (tmp_path / "log").read_text()
    worker.close()  # a second time does nothing


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"dies_at": "step"}, "ended with 3: the end"),
        ({"fails_at": "step"}, "ValueError: no"),
        ({"babbles_at": "step"}, "not an answer: 'what"),
        ({"sleeps_at": "step"}, "no answer in 0 s"),
    ],
)
def test_a_worker_that_fails_is_told_in_one_line(tmp_path: Path, settings: dict[str, str], why: str) -> None:
    with fake_worker(tmp_path, limit_s=0.5 if "sleeps_at" in settings else 30, **settings) as worker:
        worker_ready = "sleeps_at" in settings or worker.ask("hello") == {}
        assert worker_ready
        with pytest.raises(SideFailed, match=why):
            worker.ask("step")


def run_fakes(folder: Path, sides: list[FakeSide], rounds: int = 2) -> dict[str, Any]:
    return measure(TINY, list(sides), Budget(rounds, 60, 1), folder, lambda _: None)


def test_sides_take_turns_and_the_best_peer_is_the_yardstick(tmp_path: Path) -> None:
    sides = [fake(tmp_path, "a", seconds=4.0, peak=80.0), fake(tmp_path, "b", seconds=3.0), fake(tmp_path, OURS)]
    result = run_fakes(tmp_path, sides)
    asked = [line.split() for line in (tmp_path / "asked.log").read_text().splitlines()]
    assert [name for name, op, _ in asked if op == "step"] == ["a", "a", "b", "b", OURS, OURS] + ["a", "b", OURS] * 2
    assert {threads for _, _, threads in asked} == {"1"}
    assert result["ratios"] == {
        "fastest_peer": "b",
        "speed": 3.0,
        "spread": [3.0, 3.0],
        "smallest_peer": "a",
        "memory": 100 / 80,
    }
    assert result["sides"]["a"]["tokens_per_s"] == 60 / 4
    assert result["sides"]["a"]["supervised_per_s"] == result["supervised_tokens"] / 4
    assert json.loads(json.dumps(result)) == result


def test_the_fastest_way_of_a_peer_is_timed_and_its_least_memory_counts(tmp_path: Path) -> None:
    ways = (
        {"seconds": 2.0, "peak": 70.0},
        {"seconds": 1.5, "peak": 90.0},
        {"seconds": 1.0, "dies_at": "step"},
        {"seconds": 3.0, "peak": 95.0},
    )
    result = run_fakes(tmp_path, [replace(fake(tmp_path, "a"), ways=ways), fake(tmp_path, OURS)])
    side = result["sides"]["a"]
    assert side["seconds"] == [1.5, 1.5] and side["memory_mib"]["peak"] == 70.0
    assert [way.get("error", "") for way in side["ways"]] == ["", "", "ended with 3: the end", ""]


def test_a_peer_none_of_whose_ways_works_has_failed(tmp_path: Path) -> None:
    ways = ({"dies_at": "hello"}, {"fails_at": "hello"})
    result = run_fakes(tmp_path, [replace(fake(tmp_path, "a"), ways=ways), fake(tmp_path, OURS)])
    assert result["sides"]["a"]["error"] == "ended with 3: the end" and result["ratios"] == {}


@pytest.mark.parametrize("settings", [{"sum": 3.01}, {"norm": 1.1}])
def test_a_peer_that_computes_something_else_is_not_timed(tmp_path: Path, settings: dict[str, float]) -> None:
    result = run_fakes(tmp_path, [fake(tmp_path, "a", **settings), fake(tmp_path, OURS)])
    assert "differs from ours" in result["sides"]["a"]["error"] and "median_s" not in result["sides"]["a"]
    assert result["ratios"] == {} and result["sides"][OURS]["median_s"] == 1.0


@pytest.mark.parametrize("when", ["hello", "loss", "gradients"])
def test_a_side_that_fails_does_not_end_the_run(tmp_path: Path, when: str) -> None:
    sides = [fake(tmp_path, "a", dies_at=when), fake(tmp_path, "b", seconds=2.0), fake(tmp_path, OURS)]
    result = run_fakes(tmp_path, sides)
    assert result["sides"]["a"]["error"] == "ended with 3: the end"
    assert result["ratios"]["fastest_peer"] == "b" and result["ratios"]["speed"] == 2.0


def test_our_own_failure_is_told_too(tmp_path: Path) -> None:
    result = run_fakes(tmp_path, [fake(tmp_path, "a"), fake(tmp_path, OURS, fails_at="loss")])
    assert result["sides"][OURS]["error"] == "ValueError: no" and result["ratios"] == {}


def test_rounds_end_early_where_they_last_too_long(tmp_path: Path) -> None:
    result = measure(TINY, [fake(tmp_path, OURS)], Budget(9, 0.0, 1), tmp_path, lambda _: None)
    assert len(result["sides"][OURS]["seconds"]) == 3


def test_gradients_are_compared_by_norm_and_by_number() -> None:
    torch.manual_seed(0)
    gradient = torch.randn(40, 50)
    a = {"w": fingerprint(gradient), "v": fingerprint(gradient.new_zeros(3))}
    assert len(a["w"]["sample"]) == 256 and a["w"]["norm"] == pytest.approx(float(gradient.norm()))
    assert compare([1.0], [1.0], a, a, "float32").agrees
    turned = {**a, "w": fingerprint(gradient.roll(7))}  # the same norm
    other = compare([1.0], [1.0], a, turned, "float32")
    assert not other.agrees and other.weight == "w" and other.gradient_off > 0.5
    assert not compare([1.0, 2.0], [1.0, 2.01], a, a, "float32").agrees


def test_a_peer_may_leave_out_only_what_it_was_told_to() -> None:
    a = {name: {"norm": 1.0, "sample": [1.0]} for name in ("fc.weight", "lm_head.weight")}
    b = {"fc.weight": a["fc.weight"]}
    assert not compare([1.0], [1.0], a, b, "float32").agrees
    assert compare([1.0], [1.0], a, b, "float32", {"lm_head.weight"}).agrees
    assert "lm_head.weight" in compare([1.0], [1.0], a, b, "float32").words


def test_ratios_are_of_medians_and_their_spread_of_rounds() -> None:
    ours = {"median_s": 2.0, "seconds": [1.0, 2.0, 4.0], "memory_mib": {"peak": 50.0}}
    peer = {"median_s": 5.0, "seconds": [5.0, 4.0, 6.0], "memory_mib": {"peak": 200.0}}
    found = ratios({"p": peer, OURS: ours})
    assert found["speed"] == 2.5 and found["spread"] == [1.5, 5.0] and found["memory"] == 0.25
    assert ratios({"p": {"error": "no"}, OURS: ours}) == {}


def test_the_table_has_a_line_a_side_and_names_failures(tmp_path: Path) -> None:
    sides = [fake(tmp_path, "specforge", seconds=3.0), fake(tmp_path, "speculators", sum=9.0), fake(tmp_path, OURS)]
    result = run_fakes(tmp_path, sides)
    text = io.StringIO()
    facts = {"device": "cpu", "cpus": 2, "threads": 1, "load_at_start": 0.0, "torch": "x"}
    Console(file=text, width=110).print(as_table([result], facts))
    lines = text.getvalue().splitlines()
    row = {name: next(line for line in lines if name in line) for name in ("specforge", "speculators", OURS)}
    assert "3.00 (3.00-3.00)" in row["specforge"] and "failed" in row["speculators"]
    assert "3.00 (3.00-3.00)" in row[OURS] and "1.00" in row[OURS]
    assert any("speculators: not timed" in line for line in lines)


def test_a_profile_is_told_in_shares(tmp_path: Path) -> None:
    result = measure(TINY, [fake(tmp_path, OURS)], Budget(1, 60, 1, profile=True), tmp_path, lambda _: None)
    assert profile_lines(result) == ["redraft: 4.0 s: aten::mm 75%"]


def test_settings_go_to_their_side(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.touch()
    monkeypatch.setenv("SPECFORGE_VENV", str(tmp_path))
    told = ["specforge.compact_teacher=false", "redraft.head_chunk=256", "redraft.objective.outside=teach"]
    peer, ours = open_sides(["specforge"], told)
    assert peer.python == python and peer.settings == {"compact_teacher": False} and peer.ways == ({},)
    assert [way["compact_teacher"] for way in open_sides(["specforge"], [])[0].ways] == [True, False]
    assert ours.settings == {"head_chunk": 256, "objective.outside": "teach"} and ours.name == OURS
    for wrong in ("specforge=1", "speculators.head=frozen", "nonsense"):
        with pytest.raises(ConfigError, match="--set"):
            open_sides(["specforge"], [wrong])
    monkeypatch.setenv("SPECULATORS_VENV", str(tmp_path / "not"))
    with pytest.raises(ConfigError, match="make peers"):
        open_sides(["speculators"], [])


def test_our_worker_trains_and_has_the_gradients_of_the_loss(tmp_path: Path) -> None:
    files = drawn.write_case(TINY, tmp_path / "case")
    command = SideSpec(OURS, Path(sys.executable)).command(files.folder)
    with Worker(OURS, command, {"head_chunk": 32, "objective.outside": "teach"}, 1, tmp_path / "log") as worker:
        assert worker.ask("hello")["settings"]["head_chunk"] == 32
        before = worker.ask("loss")
        first, second = worker.ask("step"), worker.ask("step")
        assert second["loss"] < first["loss"] and worker.ask("loss")["sums"] != before["sums"]
        worker.ask("reset_peak")
        memory = worker.ask("memory")
        assert memory["peak"] >= memory["now"] > memory["baseline"] > 0
        worker.ask("reload")
        assert worker.ask("loss")["sums"] == pytest.approx(before["sums"], rel=1e-6)
        factors = [[0.5, 0.25, 0.125]] * len(files.lengths)
        got = worker.ask("gradients", factors=factors)["gradients"]
        operators = worker.ask("profile", rows=3)["operators"]
        assert len(operators) == 3 and operators[0]["seconds"] >= operators[1]["seconds"] > 0
        with pytest.raises(SideFailed, match="KeyError"):
            worker.ask("nonsense")
    draft, teacher, documents = drawn.draw(TINY)
    parts = ttt_loss(draft, documents.packed(), teacher, torch.tensor(factors[0], dtype=torch.float64))
    assert parts.sums.tolist() == pytest.approx(before["sums"], rel=1e-5)
    parts.loss.backward()  # type: ignore[no-untyped-call]
    wanted = {name: fingerprint(p.grad) for name, p in draft.named_parameters() if p.grad is not None}
    assert compare([1.0], [1.0], wanted, got, "float32").gradient_off < 1e-4 and got.keys() == wanted.keys()


def test_weights_on_disk_have_the_served_names(tmp_path: Path) -> None:
    drawn.write_case(TINY, tmp_path)
    draft = drawn.draw(TINY)[0]
    saved = load_file(tmp_path / "weights.safetensors")
    assert {name.removeprefix("draft.") for name in saved if name.startswith("draft.")} == set(draft.state_dict())


def test_workers_of_the_peers_import_nothing_of_ours_but_the_protocol() -> None:
    for peer in ("specforge", "speculators"):
        tree = ast.parse((ROOT / "benchmarks" / "peers" / f"{peer}_worker.py").read_text())
        modules = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module}
        modules |= {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
        ours = {
            name for name in modules if name.split(".")[0] in ("benchmarks", "eagle3", "train", "data_prep", "eval")
        }
        assert ours == {"benchmarks.peers.serving"}
    tree = ast.parse((ROOT / "benchmarks" / "peers" / "serving.py").read_text())
    roots = {node.module.split(".")[0] for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module}
    assert roots - set(sys.stdlib_module_names) == {"torch", "safetensors"}

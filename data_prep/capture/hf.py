"""Capture with Hugging Face transformers: the reference backend, for any causal language model.

Hooks read the residual stream where the wiring names it. `output_hidden_states` is not used: it keeps every
layer, and its last entry is already normed.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from data_prep.capture.sample import CapturedSample
from eagle3.errors import DataError, RedraftError, WiringError
from eagle3.hf_decoder import Decoder, find_decoder
from eagle3.hf_model import choose_device, choose_dtype, load_target
from eagle3.wiring import EMBEDDING, Wiring

Record = tuple[str, Sequence[int] | torch.Tensor, Sequence[int] | torch.Tensor]  # id, input_ids [T], loss_mask [T]


class HFCapture:
    """Runs the target's decoder over right-padded batches and keeps the states that the wiring names.

    The language-model head is never called, so no logits are computed. Padding stands on the right of a causal
    model: no real token can read it, and the attention mask says so again. Rows of padding are dropped before
    anything leaves the device.

    Args:
        path: the target's folder.
        wiring: which sites and which teacher to keep.
        device: `auto`, `cpu`, `cuda` or `cuda:<n>`.
        compute_dtype: `auto` (float32 on CPU, bfloat16 on GPU), `float32`, `bfloat16` or `float16`.
        out_dtype: dtype of the states handed over.
        trust_remote_code: run Python shipped in the target's folder.

    Raises:
        RedraftError: the target cannot be loaded whole.
        WiringError: the target's layers or width are not the wiring's.
    """

    def __init__(
        self,
        path: Path,
        wiring: Wiring,
        device: str = "auto",
        compute_dtype: str = "auto",
        out_dtype: torch.dtype = torch.bfloat16,
        trust_remote_code: bool = False,
    ) -> None:
        device = choose_device(device)
        model = load_target(path, device, choose_dtype(compute_dtype, device), trust_remote_code)
        self._adopt(model, wiring, out_dtype)

    @classmethod
    def from_model(cls, model: nn.Module, wiring: Wiring, out_dtype: torch.dtype = torch.bfloat16) -> HFCapture:
        """Capture from a model that is already in memory."""
        capture = cls.__new__(cls)
        capture._adopt(model, wiring, out_dtype)
        return capture

    def _adopt(self, model: nn.Module, wiring: Wiring, out_dtype: torch.dtype) -> None:
        self.wiring, self.out_dtype = wiring, out_dtype
        self.decoder: Decoder = find_decoder(model, wiring.num_layers)
        weight: torch.Tensor = self.decoder.embedding.weight  # type: ignore[assignment]  # [V, H]
        self.vocab_size, width = weight.shape
        self.device = weight.device
        if width != wiring.hidden_size:
            raise WiringError(
                "the target has another width than the wiring",
                where=type(model).__name__,
                why=f"hidden size {width}, expected {wiring.hidden_size}",
                mend="correct target.hidden_size, or point target.path at the model the wiring is for",
            )
        self._embedding_checked = EMBEDDING not in wiring.aux
        self.info: dict[str, Any] = {
            "backend": "hf",
            "compute_dtype": str(weight.dtype).removeprefix("torch."),
        }

    def run(self, batch: Sequence[Record]) -> list[CapturedSample]:
        """Capture a batch of records (`record_id`, `input_ids` [T], `loss_mask` [T]), in the given order.

        Returns:
            One sample a record; states are CPU tensors of `out_dtype`.

        Raises:
            DataError: an empty record, lengths that differ, or a token outside the vocabulary.
            WiringError: the wiring uses the embedding, and this target changes it before layer 0.
            RedraftError: not enough memory, or states that are not finite.
        """
        tokens = [self._tokens(*record) for record in batch]
        input_ids, keep = _pad(tokens)  # [B, L] int64, [B, L] bool
        taps = _Taps(self.decoder, self.wiring, keep, self.out_dtype, watch_embedding=not self._embedding_checked)
        try:
            with torch.no_grad(), taps:
                output = self.decoder.body(
                    input_ids=input_ids.to(self.device), attention_mask=keep.to(self.device), use_cache=False
                )
                if self.wiring.teacher == "final_normed":
                    taps.keep_final(output[0])
        except torch.cuda.OutOfMemoryError:
            raise RedraftError(
                "out of GPU memory while capturing",
                where=f"a batch of {input_ids.shape[0]} x {input_ids.shape[1]} tokens",
                mend="lower capture.batch_tokens, or data.max_length when one conversation alone is too long",
            ) from None
        if taps.entering is not None:
            self._check_embedding(taps.entering, input_ids, keep)
        states = taps.collect()
        return self._split(batch, tokens, states)

    def _tokens(self, record_id: str, input_ids: Any, loss_mask: Any) -> torch.Tensor:
        ids = torch.as_tensor(input_ids, dtype=torch.int64)  # [T]
        problem = ""
        if ids.ndim != 1 or ids.numel() == 0:
            problem = "it has no tokens"
        elif len(loss_mask) != ids.numel():
            problem = f"{ids.numel()} tokens but {len(loss_mask)} mask entries"
        elif int(ids.min()) < 0 or int(ids.max()) >= self.vocab_size:
            problem = f"token ids {int(ids.min())} to {int(ids.max())}; the target has {self.vocab_size}"
        if problem:
            raise DataError(
                "a record cannot be captured",
                where=f"record {record_id}",
                why=problem,
                mend="prepare the data again with this target's tokenizer",
            )
        return ids

    def _check_embedding(self, entering: torch.Tensor, input_ids: torch.Tensor, keep: torch.Tensor) -> None:
        table: torch.Tensor = self.decoder.embedding.weight  # type: ignore[assignment]
        looked_up = table.detach()[input_ids[keep].to(table.device)]  # [N, H]
        if not torch.equal(looked_up, entering.to(table.device)):
            raise WiringError(
                "this target changes its embedding before layer 0",
                where="wiring.aux: embedding",
                why="what enters layer 0 is not the token's row of the embedding table",
                mend="name a layer instead of the embedding",
            )
        self._embedding_checked = True

    def _split(
        self, batch: Sequence[Record], tokens: list[torch.Tensor], states: dict[str, torch.Tensor]
    ) -> list[CapturedSample]:
        lengths = [ids.numel() for ids in tokens]
        parts = {name: state.split(lengths) for name, state in states.items()}
        samples = []
        for i, ((record_id, _, loss_mask), ids) in enumerate(zip(batch, tokens, strict=True)):
            named = {name: part[i] for name, part in parts.items()}
            final = named.pop("final")
            if not all(bool(state.isfinite().all()) for state in (*named.values(), final)):
                raise RedraftError(
                    "the target gave states that are not finite",
                    where=f"record {record_id}",
                    why=f"computed in {self.info['compute_dtype']}, kept in {self.out_dtype}",
                    mend="set capture.compute_dtype=float32 or bfloat16, and check the target's weights",
                )
            mask = torch.as_tensor(loss_mask).bool()
            samples.append(CapturedSample(record_id, ids, mask, named, final, self.wiring.teacher))
        return samples


def _pad(tokens: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Right-pad with token 0. Returns ids [B, L] int64 and keep [B, L] bool."""
    length = max(ids.numel() for ids in tokens)
    input_ids = torch.zeros(len(tokens), length, dtype=torch.int64)
    keep = torch.zeros(len(tokens), length, dtype=torch.bool)
    for row, ids in enumerate(tokens):
        input_ids[row, : ids.numel()] = ids
        keep[row, : ids.numel()] = True
    return input_ids, keep


class _Taps:
    """Forward hooks that copy the kept rows out as [N, H], N = real tokens of the batch, row by row."""

    def __init__(
        self, decoder: Decoder, wiring: Wiring, keep: torch.Tensor, dtype: torch.dtype, watch_embedding: bool
    ) -> None:
        self.decoder, self.wiring, self.keep, self.dtype = decoder, wiring, keep, dtype
        self.watch_embedding = watch_embedding
        self.entering: torch.Tensor | None = None  # [N, H] what entered layer 0
        self.states: dict[str, torch.Tensor] = {}
        self.handles: list[Any] = []

    def __enter__(self) -> _Taps:
        for site in self.wiring.stored_sites:
            self.handles.append(self._before(self.decoder.layers[site.layer], site.name))
        if self.watch_embedding:
            self.handles.append(self._before(self.decoder.layers[0], "embedding"))
        if self.wiring.teacher == "final":
            last = self.decoder.layers[-1]
            self.handles.append(last.register_forward_hook(lambda _m, _a, output: self.keep_final(_tensor(output))))
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self.handles:
            handle.remove()

    def _before(self, layer: nn.Module, name: str) -> Any:
        def hook(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            entering = args[0] if args else kwargs["hidden_states"]  # [B, L, H]
            if name == "embedding":
                self.entering = self._rows(entering).clone()
            else:
                self.states[name] = self._out(entering)

        return layer.register_forward_pre_hook(hook, with_kwargs=True)

    def keep_final(self, state: torch.Tensor) -> None:
        self.states["final"] = self._out(state)

    def _rows(self, state: torch.Tensor) -> torch.Tensor:
        if bool(self.keep.all()):
            return state.reshape(-1, state.shape[-1])  # [N, H]
        return state[self.keep.to(state.device)]  # [N, H]

    def _out(self, state: torch.Tensor) -> torch.Tensor:
        rows = self._rows(state).to(self.dtype, copy=True)  # a copy: later layers may write in place
        if rows.device.type == "cpu":
            return rows
        host = torch.empty(rows.shape, dtype=rows.dtype, pin_memory=True)
        return host.copy_(rows, non_blocking=True)  # overlaps with the layers that follow

    def collect(self) -> dict[str, torch.Tensor]:
        """The states, once the copies off the device are done."""
        if torch.cuda.is_available():
            for device in {p.device for p in self.decoder.layers.parameters() if p.device.type == "cuda"}:
                torch.cuda.synchronize(device)
        return self.states


def _tensor(output: Any) -> torch.Tensor:
    """A decoder layer returns its state, or a tuple that starts with it."""
    return output if isinstance(output, torch.Tensor) else output[0]

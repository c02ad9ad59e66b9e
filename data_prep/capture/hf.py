"""Capture with Hugging Face transformers: the reference backend, for any causal language model.

Hooks read the residual stream where the wiring names it. `output_hidden_states` is not used: it keeps every
layer, and its last entry is already normed.
"""

from __future__ import annotations

import contextlib
from bisect import bisect
from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import nn

from data_prep.capture.finite import all_finite
from data_prep.capture.rows_out import RowCopies, Streams
from data_prep.capture.sample import CapturedSample
from eagle3.errors import DataError, RedraftError, WiringError
from eagle3.hf_decoder import Decoder, DeepEnough, find_decoder
from eagle3.hf_model import choose_device, choose_dtype, load_target
from eagle3.wiring import EMBEDDING, Wiring

Record = tuple[str, Sequence[int] | torch.Tensor, Sequence[int] | torch.Tensor]  # id, input_ids [T], loss_mask [T]


class HFCapture:
    """Runs the target's decoder over right-padded batches and keeps the states that the wiring names.

    The language-model head is never called, so no logits are computed, and without a teacher no layer above the
    deepest site is run. Padding stands on the right of a causal model, where no real token can read it; so no
    attention mask is given, which would cost the target its fast attention kernels. Rows of padding are dropped before
    anything leaves the device.

    Args:
        path: the target's folder.
        wiring: which sites and which teacher to keep.
        device: `auto`, `cpu`, `cuda` or `cuda:<n>`.
        compute_dtype: `auto` (float32 on CPU, bfloat16 on GPU), `float32`, `bfloat16` or `float16`.
        out_dtype: dtype of the states handed over.
        trust_remote_code: run Python shipped in the target's folder.
        teacher: keep the teacher's state too; without it samples have an empty `final` and fit no store.

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
        teacher: bool = True,
    ) -> None:
        device = choose_device(device)
        model = load_target(path, device, choose_dtype(compute_dtype, device), trust_remote_code)
        self._adopt(model, wiring, out_dtype, teacher)

    @classmethod
    def from_model(
        cls, model: nn.Module, wiring: Wiring, out_dtype: torch.dtype = torch.bfloat16, teacher: bool = True
    ) -> HFCapture:
        """Capture from a model that is already in memory."""
        capture = cls.__new__(cls)
        capture._adopt(model, wiring, out_dtype, teacher)
        return capture

    def _adopt(self, model: nn.Module, wiring: Wiring, out_dtype: torch.dtype, teacher: bool) -> None:
        self.wiring, self.out_dtype, self.teacher = wiring, out_dtype, teacher
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
        self._streams: Streams = {}
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
        return self.begin(batch)()

    def begin(self, batch: Sequence[Record]) -> Callable[[], list[CapturedSample]]:
        """Put a batch on its way, as `run` does, and return what waits for it and gives its samples.

        A GPU goes on with the next batch that is begun while the states of this one are copied out and checked.

        Raises:
            As `run`, but for states that are not finite, which the returned function finds.
        """
        tokens = [self._tokens(*record) for record in batch]
        copies = RowCopies([ids.numel() for ids in tokens], self.out_dtype, self._streams)
        taps = _Taps(self.decoder, self.wiring, copies, self.teacher, not self._embedding_checked)
        input_ids = _pad(tokens)  # [B, L] int64
        try:
            with torch.no_grad(), taps, contextlib.suppress(DeepEnough):
                output = self.decoder.body(input_ids=self._on_device(input_ids), use_cache=False)
                if taps.teacher == "final_normed":
                    taps.keep("final", output[0])
            if taps.entering is not None:
                self._check_embedding(taps.entering, torch.cat(tokens))
        except torch.cuda.OutOfMemoryError:
            raise RedraftError(
                "out of GPU memory while capturing",
                where=f"a batch of {input_ids.shape[0]} x {input_ids.shape[1]} tokens",
                mend="lower capture.batch_tokens, or data.max_length when one conversation alone is too long",
                page="capture",
            ) from None
        states, wait = taps.states, copies.wait_for()

        def finish() -> list[CapturedSample]:
            wait()
            return self._split(batch, tokens, states)

        return finish

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

    def _on_device(self, input_ids: torch.Tensor) -> torch.Tensor:
        if self.device.type != "cuda":
            return input_ids.to(self.device)
        return input_ids.pin_memory().to(self.device, non_blocking=True)  # a plain copy would wait for the batch before

    def _check_embedding(self, entering: torch.Tensor, ids: torch.Tensor) -> None:
        table: torch.Tensor = self.decoder.embedding.weight  # type: ignore[assignment]
        looked_up = table.detach()[ids.to(table.device)]  # [N, H]
        if not torch.equal(looked_up, entering.to(table.device)):
            raise WiringError(
                "this target changes its embedding before layer 0",
                where="wiring.aux: embedding",
                why="what enters layer 0 is not the token's row of the embedding table",
                mend="name a layer instead of the embedding",
                page="capture",
            )
        self._embedding_checked = True

    def _split(
        self, batch: Sequence[Record], tokens: list[torch.Tensor], states: dict[str, torch.Tensor]
    ) -> list[CapturedSample]:
        lengths = [ids.numel() for ids in tokens]
        if not all(map(all_finite, states.values())):
            self._refuse_infinite(batch, lengths, states)
        parts = {name: state.split(lengths) for name, state in states.items()}
        nothing = torch.empty(0, self.wiring.hidden_size, dtype=self.out_dtype)
        samples = []
        for i, ((record_id, _, loss_mask), ids) in enumerate(zip(batch, tokens, strict=True)):
            named = {name: part[i] for name, part in parts.items()}
            final = named.pop("final", nothing)
            mask = torch.as_tensor(loss_mask).bool()
            samples.append(CapturedSample(record_id, ids, mask, named, final, self.wiring.teacher))
        return samples

    def _refuse_infinite(
        self, batch: Sequence[Record], lengths: list[int], states: dict[str, torch.Tensor]
    ) -> NoReturn:
        first = min(int((~state.isfinite()).any(1).nonzero()[0]) for state in states.values() if not all_finite(state))
        ends = list(accumulate(lengths))
        raise RedraftError(
            "the target gave states that are not finite",
            where=f"record {batch[bisect(ends, first)][0]}",
            why=f"computed in {self.info['compute_dtype']}, kept in {self.out_dtype}",
            mend="set capture.compute_dtype=float32 or bfloat16, and check the target's weights",
        )


def _pad(tokens: list[torch.Tensor]) -> torch.Tensor:
    """Right-pad with token 0: [B, L] int64."""
    return nn.utils.rnn.pad_sequence(tokens, batch_first=True)


class _Taps:
    """Forward hooks that copy the real rows out.

    Args:
        decoder: where to hook.
        wiring: its stored sites, and its teacher, are kept.
        copies: takes the rows of the batch.
        teacher: keep the teacher's state; if not, the pass ends at the deepest site.
        watch_embedding: keep what enters layer 0 in `entering`, too.

    Attributes:
        states: name -> [N, H] on the CPU, N = tokens of the batch, record by record.
        entering: [N, H] what entered layer 0, where the target computes.
    """

    def __init__(
        self, decoder: Decoder, wiring: Wiring, copies: RowCopies, teacher: bool, watch_embedding: bool
    ) -> None:
        self.decoder, self.wiring, self.copies = decoder, wiring, copies
        self.teacher = wiring.teacher if teacher else ""
        self.watch_embedding = watch_embedding
        self.entering: torch.Tensor | None = None
        self.states: dict[str, torch.Tensor] = {}
        self._handles: list[Any] = []

    def __enter__(self) -> _Taps:
        sites = self.wiring.stored_sites
        for site in sites:
            self._before(site.layer, partial(self.keep, site.name))
        if self.watch_embedding:
            self._before(0, self._see_embedding)
        if not self.teacher:
            self._before(max((site.layer for site in sites), default=0), _stop)
        elif self.teacher == "final":
            self._handles.append(self.decoder.layers[-1].register_forward_hook(self._after_last))
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()

    def _before(self, layer: int, see: Callable[[torch.Tensor], None]) -> None:
        def hook(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            see(args[0] if args else kwargs["hidden_states"])  # [B, L, H]

        self._handles.append(self.decoder.layers[layer].register_forward_pre_hook(hook, with_kwargs=True))

    def _after_last(self, _module: nn.Module, _args: tuple[Any, ...], output: Any) -> None:
        self.keep("final", _tensor(output))

    def _see_embedding(self, state: torch.Tensor) -> None:
        self.entering = self.copies.rows(state, state.dtype)

    def keep(self, name: str, state: torch.Tensor) -> None:
        """Keep a state [B, L, H] under `name`."""
        self.states[name] = self.copies.to_host(state)


def _stop(_state: torch.Tensor) -> None:
    raise DeepEnough


def _tensor(output: Any) -> torch.Tensor:
    """A decoder layer returns its state, or a tuple that starts with it."""
    return output if isinstance(output, torch.Tensor) else output[0]

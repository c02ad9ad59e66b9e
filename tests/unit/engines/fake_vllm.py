"""The stand-in of `fake_sglang.py` with vLLM's paths and answers."""

from __future__ import annotations

import argparse
import json
from http.server import ThreadingHTTPServer
from typing import Any

import fake_sglang
from fake_sglang import Handler, State


def completion(prompt: list[int], most: int, steps: int) -> dict[str, Any]:
    """The same text as SGLang's stand-in, told as vLLM tells it."""
    made = fake_sglang.answer(prompt, most, steps)
    tokens, meta = made["output_ids"], made["meta_info"]
    metrics: dict[str, Any] = {"time_to_first_token_ms": 0.01}
    verifies = meta.get("spec_verify_ct", 0)
    if verifies:
        kept = [fake_sglang.kept_in(k, steps) for k in range(verifies)]
        metrics["speculative_decoding"] = {
            "mean_acceptance_length": 1 + sum(kept) / verifies,
            "acceptance_histogram": [kept.count(c) for c in range(steps + 1)],
            "num_spec_steps": verifies,
            "num_accepted_draft_tokens": sum(kept),
            "num_draft_tokens": verifies * steps,
            "num_spec_tokens": steps,
            "per_step_accepted": kept,
            "per_step_drafted": [steps] * verifies,
        }
    reason = meta["finish_reason"]["type"]
    return {
        "choices": [{"index": 0, "text": "", "finish_reason": reason, "token_ids": tokens}],
        "usage": {"completion_tokens": len(tokens)},
        "metrics": metrics,
    }


class VLLMHandler(Handler):
    """vLLM's paths."""

    def do_GET(self) -> None:
        args = self.args
        if self.path == "/v1/models":
            self.reply(200, json.dumps({"data": [{"id": "served-name", "root": args.model}]}).encode())
        elif self.path == "/version":
            self.reply(200, json.dumps({"version": "0.32.0"}).encode())
        elif self.path.startswith("/server_info") and args.fault != "tells_nothing":
            self.reply(200, json.dumps({"vllm_config": config_of(args)}).encode())
        else:
            super().do_GET()

    def outcome(self, body: Any, number: int) -> tuple[int, bytes]:
        steps = (self.args.speculative_config or {}).get("num_speculative_tokens", 0)
        made = completion(body["prompt"], body["max_tokens"], steps)
        if self.args.fault == "no_counts":
            del made["metrics"]["speculative_decoding"]
        return 200, json.dumps(made).encode()


def config_of(args: argparse.Namespace) -> dict[str, Any]:
    draft = args.speculative_config
    if draft and args.fault == "other_values":
        draft = {**draft, "num_speculative_tokens": 1}
    return {
        "model_config": {"model": args.model, "dtype": f"torch.{args.dtype}"},
        "speculative_config": draft,
        "parallel_config": {"tensor_parallel_size": args.tensor_parallel_size},
        "cache_config": {"enable_prefix_caching": not args.no_enable_prefix_caching},
        "scheduler_config": {"max_num_seqs": 4},
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("--fault", "--model", "--host", "--dtype", "--per-request-spec-decode-metrics"):
        parser.add_argument(name)
    parser.add_argument("--port", type=int)
    parser.add_argument("--tensor-parallel-size", type=int)
    parser.add_argument("--delay", type=float, default=0.0)
    parser.add_argument("--speculative-config", type=json.loads)
    parser.add_argument("--no-enable-prefix-caching", action="store_true")
    parser.add_argument("--enable-per-request-metrics", action="store_true")
    args = parser.parse_args()
    args.info_path = ""
    VLLMHandler.args, VLLMHandler.state = args, State()
    server = ThreadingHTTPServer((args.host, args.port), VLLMHandler)
    server.daemon_threads = True
    server.serve_forever()


if __name__ == "__main__":
    main()

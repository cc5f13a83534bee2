"""Serve bundles over HTTP with OpenAI's, Anthropic's and Ollama's APIs, and a chat page at /.

Endpoints: /v1/models, /v1/chat/completions, /v1/completions, /v1/responses, /v1/messages,
/v1/embeddings, /api/chat, /api/generate, /tokenize, /health, /metrics for Prometheus, and
/openapi.json, which describes all paths and fields. If a request has a field that has no effect,
the field is logged. If the field is unsupported and would change the answer, the status is 400.

A bundle compiled with --batch 4,8 decodes up to 8 requests at once. The default sampling is the
model's generation_config. With several bundles, the server opens a bundle when a request names it
in "model". It closes the bundle after --keep-alive seconds without a request, or when another
bundle needs its memory.
"""

import argparse
import os
import re
from ipaddress import ip_address

from castiron.pipelines.cli.open_engine import open_model
from castiron.pipelines.cli.options import add_loading, add_model, add_options, prefix_store
from castiron.pipelines.errors import PipelineError
from castiron.pipelines.terminal import counted, print_message

EXAMPLES = """\
examples:
  castiron serve smollm2-135m-instruct
  castiron serve build/smollm2-135m-instruct build/gemma-3-270m --keep-alive 600
  castiron serve build/larger --draft-model build/smaller
  curl http://127.0.0.1:8000/v1/chat/completions \\
    -d '{"messages": [{"role": "user", "content": "Why is the sky blue?"}], "max_tokens": 60}'

A server on a loopback address stores the states of long prompts in the cache folder, for its next
start. --prefix-cache none switches this off.

Status 503: the queue is full. 413: the body exceeds --max-body. 400: the prompt exceeds the
context. SIGTERM or Ctrl-C: new requests get 503, running ones have --shutdown-timeout seconds, and the exit
status is 0. docs/serving.md describes scheduling.
"""
# Seconds without a request after which one of several models is closed.
KEEP = 300.0
KEY_VARIABLE = "CASTIRON_API_KEY"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model(parser, nargs="+")
    parser.add_argument("--host", default="127.0.0.1", metavar="ADDRESS",
                        help="address to listen on; 0.0.0.0 is all (default: 127.0.0.1)")  # fmt: skip
    parser.add_argument("--port", type=int, default=8000, metavar="N", help="port to listen on; 0 is any (default: 8000)")
    parser.add_argument("--api-key", action="append", default=[], metavar="KEY",
                        help=f"require this key; may be repeated; also {KEY_VARIABLE}=KEY,KEY")  # fmt: skip
    parser.add_argument("--share-prefixes", action="store_true",
                        help="reuse prefixes of prompts also between keys, which can learn each other's prompts")  # fmt: skip
    parser.add_argument("--name", metavar="NAME", help="the model's name for clients (default: as MODEL was given)")
    add_options(parser, "-c --context")
    parser.add_argument("--quiet", action="store_true", help="do not log requests")
    parser.add_argument("--cors", action="append", default=[], metavar="ORIGIN",
                        help="allow pages of this origin, or * for all; may be repeated (default: none)")  # fmt: skip
    group = parser.add_argument_group("models and sampling")
    group.add_argument("--keep-alive", type=float, metavar="S",
                       help="close an unused model after S seconds (default: 300; a single model: never)")  # fmt: skip
    group.add_argument(
        "--temperature", "--temp", type=float, metavar="T", help="default temperature (default: the model's, else 1)"
    )
    group.add_argument("--repeat-penalty", type=float, metavar="X",
                       help="default penalty of the last 64 tokens (default: the model's, else 1, off)")  # fmt: skip
    add_options(group, "--template-arg", "--parse-special", "--draft-model", "--prefix-cache", "--prefix-cache-size")
    limits = parser.add_argument_group("limits")
    add_options(limits, "-n --max-tokens", default=8192,
                help="max tokens of an answer whose request sets no limit (default: 8192)")  # fmt: skip
    limits.add_argument(
        "--max-queue", type=int, default=64, metavar="N", help="max waiting requests of one client (default: 64)"
    )
    limits.add_argument("--scheduling-policy", choices=("fair", "priority"), default="fair", metavar="NAME",
                        help="fair: share slots between clients; priority: that of each request (default: fair)")  # fmt: skip
    limits.add_argument("--max-body", type=float, default=4.0, metavar="MB", help="largest request body (default: 4)")
    limits.add_argument("--strict-requests", action="store_true", help="reject fields that have no effect")
    limits.add_argument("--timeout", type=float, default=600.0, metavar="S",
                        help="seconds for a request, including waiting (default: 600)")  # fmt: skip
    limits.add_argument("--shutdown-timeout", type=float, default=10.0, metavar="S",
                        help="seconds for running requests after SIGTERM (default: 10)")  # fmt: skip
    add_loading(parser)


def main(args: argparse.Namespace) -> int:
    # Imported before the model is loaded, so that a missing package is reported at once.
    from castiron.pipelines.api.generation_api import GenerationApi
    from castiron.pipelines.api.model_api import Limits, names_of
    from castiron.pipelines.compile.open_model import check_draft_model
    from castiron.pipelines.engine.memory import print_memory, slots_of
    from castiron.pipelines.server.app import Access, App, open_api
    from castiron.pipelines.server.http_server import listen, serve, url
    from castiron.pipelines.server.metrics import Metrics
    from castiron.pipelines.server.served_models import ModelPool

    check(args)
    keys, pages = api_keys(args), origins(args)
    limits = Limits(
        args.timeout, int(args.max_body * 1e6), args.temperature, args.repeat_penalty,
        priorities=args.scheduling_policy == "priority", strict_requests=args.strict_requests, max_tokens=args.max_tokens,
    )  # fmt: skip
    shared = {"threads": args.threads, "queue": args.max_queue, "limits": limits, "template_args": dict(args.template_arg),
              "parse_special": args.parse_special}  # fmt: skip
    with listen(args.host, args.port) as listening:
        local = ip_address(listening.getsockname()[0].partition("%")[0]).is_loopback
        if args.draft_model:
            check_draft_model(args.draft_model, args.bundle[0])
        bundles = [open_model(path, args) for path in args.bundle]
        metrics, access = Metrics(), Access(keys, pages, local, args.share_prefixes)
        open_one = lambda bundle, names, draft=None: open_api(
            bundle, metrics, names=names, store=prefix_store(args, bundle.manifest, is_automatic=local), draft=draft, **shared
        )
        if len(bundles) > 1 or args.keep_alive is not None:
            keep = KEEP if args.keep_alive is None else args.keep_alive
            pool = ModelPool(bundles, open_one, keep=keep, arguments=args.bundle, limits=limits, forget=metrics.forget)
            how = "each opened when a request names it"
        else:
            (bundle,), draft = bundles, open_model(args.draft_model, args, draft=True) if args.draft_model else None
            print_memory(bundle.manifest, slots_of(bundle.manifest), draft and draft.manifest)
            api = open_one(bundle, [args.name] if args.name else names_of(bundle, args.bundle[0]), draft)
            how = "an embedding model: /v1/embeddings"
            if isinstance(api, GenerationApi):
                if api.engine.slots == 1:
                    print_message("requests run one at a time: this bundle has no batch functions; compile with --batch 4,8")
                slots = counted(api.engine.slots, "sequence")
                how = f"{slots} at once, context {api.context}; default sampling: {api.sampling}"
            pool = ModelPool.single(api)
        names = ", ".join(model.name for model in pool.models)
        print_message(f"{names} at {url(listening)} ({how})")
        serve(App(pool, metrics, access, quiet=args.quiet), pool, listening, args.shutdown_timeout)
    return 0


def check(args: argparse.Namespace) -> None:
    ranges = (
        ("port", 0 <= args.port < 65536, "between 0 and 65535"),
        ("temperature", args.temperature is None or 0 <= args.temperature <= 2, "between 0 and 2"),
        ("repeat-penalty", args.repeat_penalty is None or 0.01 <= args.repeat_penalty <= 100, "between 0.01 and 100"),
        ("max-tokens", args.max_tokens >= 1, "at least 1"),
        ("max-queue", args.max_queue >= 0, "0 or more"),
        ("max-body", 0 < args.max_body < float("inf"), "above 0"),
        ("timeout", 0 < args.timeout < float("inf"), "above 0"),
        ("keep-alive", args.keep_alive is None or 0 <= args.keep_alive < float("inf"), "0 or more"),
        ("shutdown-timeout", 0 <= args.shutdown_timeout < float("inf"), "0 or more"),
    )
    if not args.host:
        # With an empty host, the operating system would listen on every address.
        raise PipelineError("--host is empty; give an address, or leave the option out for 127.0.0.1")
    for name, holds, wanted in ranges:
        if not holds:
            raise PipelineError(f"--{name} is {getattr(args, name.replace('-', '_'))}; it must be {wanted}")
    for name in ("name", "draft-model"):
        if getattr(args, name.replace("-", "_")) and (len(args.bundle) > 1 or args.keep_alive is not None):
            raise PipelineError(
                f"--{name} supports neither --keep-alive nor several models; remove --{name}, "
                "or serve one model without --keep-alive"
            )


def origins(args: argparse.Namespace) -> list[str]:
    """Return the web origins that --cors allows, in lower case; PipelineError if one is invalid."""
    for origin in args.cors:
        if not re.fullmatch(r"\*|null|[a-z][a-z0-9+.-]*://[^/?#\s]+", origin):
            raise PipelineError(f"--cors is {origin!r}; give an origin as browsers send it, such as https://example.com, or *")
    return [origin.lower() for origin in args.cors]


def api_keys(args: argparse.Namespace) -> list[str]:
    """Return the keys of --api-key and CASTIRON_API_KEY; PipelineError if one is empty."""
    if not all(key.strip() for key in args.api_key):
        raise PipelineError("--api-key is empty; give a key, or leave the option out to serve without authentication")
    given = os.environ.get(KEY_VARIABLE)
    keys = [key.strip() for key in (given or "").split(",") if key.strip()]
    if given is not None and not keys:
        # An empty variable must not turn authentication off.
        raise PipelineError(f"{KEY_VARIABLE} is set but has no key; give keys with commas between them, or unset it")
    return [*args.api_key, *keys]

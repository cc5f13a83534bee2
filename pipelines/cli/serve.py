"""Serve bundles over HTTP with OpenAI's and Anthropic's API, and a chat page at /.

Endpoints: /v1/models, /v1/chat/completions, /v1/completions, /v1/responses, /v1/messages,
/v1/embeddings, /tokenize, /detokenize, /health, /metrics for Prometheus, and /openapi.json, which
describes every field. A field that is not supported is rejected with status 400.

A bundle compiled with --batch 4,8 decodes up to 8 requests at once. Sampling that a request does
not set comes from the model's generation_config; /v1/models shows it. With several bundles, each is
opened when a request first names it in "model", and closed after --keep seconds without a request
or when another one needs its memory.
"""

import argparse
import os
import re
from ipaddress import ip_address

from castiron.pipelines.cli.options import add_model, add_options, open_model, prefix_store
from castiron.pipelines.errors import PipelineError
from castiron.pipelines.terminal import print_message

EXAMPLES = """\
examples:
  castiron serve smollm2-135m-instruct
  castiron serve build/smollm2-135m-instruct
  castiron serve build/smollm2-135m-instruct build/gemma-3-270m --keep 600
  castiron serve build/smollm2-135m-instruct --scheduling-policy priority
  castiron serve build/larger --draft build/smaller
  curl http://127.0.0.1:8000/v1/chat/completions \\
    -d '{"messages": [{"role": "user", "content": "Why is the sky blue?"}], "max_tokens": 60}'
  curl http://127.0.0.1:8000/v1/messages \\
    -d '{"messages": [{"role": "user", "content": "Why is the sky blue?"}], "max_tokens": 60}'
  python -c 'from openai import OpenAI; print(OpenAI(base_url="http://127.0.0.1:8000/v1", api_key="-").models.list())'

Status 503: the queue is full. 413: the body exceeds --max-body. 400: the prompt exceeds the
context. SIGTERM or Ctrl-C: new requests get 503, running ones have --grace seconds, and the exit
status is 0. docs/serving.md describes scheduling.
"""
# Seconds without a request after which one of several models is closed.
KEEP = 300.0
KEY_VARIABLE = "CASTIRON_API_KEY"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model(parser, nargs="+")
    parser.add_argument("--host", default="127.0.0.1", metavar="ADDRESS", help="address to listen on; 0.0.0.0 is all "
                        "(default: 127.0.0.1)")  # fmt: skip
    parser.add_argument("--port", type=int, default=8000, metavar="N", help="port to listen on; 0 is any (default: 8000)")
    parser.add_argument("--api-key", action="append", default=[], metavar="KEY",
                        help=f"require this key; may be repeated; also {KEY_VARIABLE}=KEY,KEY")  # fmt: skip
    add_options(parser, "-c --context", "--threads")
    parser.add_argument("--quiet", action="store_true", help="do not log requests")
    group = parser.add_argument_group("models")
    group.add_argument("--name", metavar="NAME", help="the model's name for clients (default: the bundle's)")
    group.add_argument("--keep", type=float, metavar="S",
                       help="close an unused model after S seconds (default: 300; a single model: never)")  # fmt: skip
    group.add_argument("--temperature", type=float, metavar="T", help="default temperature (default: the model's, else 1)")
    add_options(group, "--template-arg", "--parse-special", "--draft", "--prefix-cache", "--prefix-cache-size")
    limits = parser.add_argument_group("limits")
    limits.add_argument("--queue", type=int, default=64, metavar="N", help="waiting requests of one client (default: 64)")
    limits.add_argument("--scheduling-policy", choices=("fair", "priority"), default="fair",
                        help="share slots between clients, or use requests' priority (default: fair)")  # fmt: skip
    limits.add_argument("--max-body", type=float, default=4.0, metavar="MB", help="largest request body (default: 4)")
    limits.add_argument("--timeout", type=float, default=600.0, metavar="S",
                        help="seconds for a request, including waiting (default: 600)")  # fmt: skip
    limits.add_argument("--grace", type=float, default=10.0, metavar="S", help="seconds to finish after SIGTERM (default: 10)")
    access = parser.add_argument_group("browsers and clients")
    access.add_argument("--cors", action="append", default=[], metavar="ORIGIN",
                        help="allow pages of this origin, or * for all; may be repeated (default: none)")  # fmt: skip


def main(args: argparse.Namespace) -> int:
    # Imported before the model is loaded, so that a missing package is reported at once.
    from castiron.pipelines.api.generation_api import GenerationApi
    from castiron.pipelines.api.model_api import Limits
    from castiron.pipelines.engine.memory import print_memory, slots_of
    from castiron.pipelines.server.app import Access, App, open_api
    from castiron.pipelines.server.http_server import listen, serve, url
    from castiron.pipelines.server.metrics import Metrics
    from castiron.pipelines.server.served_models import ModelPool

    check(args)
    keys, pages = api_keys(args), origins(args)
    limits = Limits(args.timeout, int(args.max_body * 1e6), args.temperature, args.scheduling_policy == "priority")
    shared = {"threads": args.threads, "queue": args.queue, "limits": limits, "template_args": dict(args.template_arg),
              "parse_special": args.parse_special}  # fmt: skip
    with listen(args.host, args.port) as listening:
        local = ip_address(listening.getsockname()[0].partition("%")[0]).is_loopback
        bundles = [open_model(path, args) for path in args.bundle]
        metrics, access = Metrics(), Access(keys, pages, local)
        if len(bundles) > 1 or args.keep is not None:
            open_one = lambda bundle, name: open_api(
                bundle, metrics, name=name, store=prefix_store(args, bundle.manifest), **shared
            )
            keep = KEEP if args.keep is None else args.keep
            pool = ModelPool(bundles, open_one, keep=keep, limits=limits, forget=metrics.forget)
            names = ", ".join(model.name for model in pool.models)
            print_message(f"{names} at {url(listening)} (each opened when a request names it)")
            serve(App(pool, metrics, access, quiet=args.quiet), pool, listening, args.grace)
            return 0
        (bundle,) = bundles
        draft = open_model(args.draft, args) if args.draft else None
        print_memory(bundle.manifest, slots_of(bundle.manifest), draft and draft.manifest)
        api = open_api(bundle, metrics, name=args.name, store=prefix_store(args, bundle.manifest), draft=draft, **shared)
        slots = api.engine.slots
        if isinstance(api, GenerationApi) and slots == 1:
            print_message("requests run one at a time: this bundle has no batch functions; compile with --batch 4,8")
        how = "an embedding model: /v1/embeddings"
        if isinstance(api, GenerationApi):
            how = f"{slots} sequence{'s' * (slots > 1)} at once, context {api.context}; "
            how += f"default sampling: {api.sampling}"
        print_message(f"{api.names[0]} at {url(listening)} ({how})")
        model = ModelPool.single(api)
        serve(App(model, metrics, access, quiet=args.quiet), model, listening, args.grace)
    return 0


def check(args: argparse.Namespace) -> None:
    """Raise PipelineError for numbers out of range, before any model is loaded."""
    ranges = (
        ("port", 0 <= args.port < 65536, "between 0 and 65535"),
        ("temperature", args.temperature is None or 0 <= args.temperature <= 2, "between 0 and 2"),
        ("queue", args.queue >= 0, "0 or more"),
        ("max-body", 0 < args.max_body < float("inf"), "above 0"),
        ("timeout", 0 < args.timeout < float("inf"), "above 0"),
        ("keep", args.keep is None or 0 <= args.keep < float("inf"), "0 or more"),
        ("grace", 0 <= args.grace < float("inf"), "0 or more"),
    )
    if not args.host:
        # The system would listen on every address.
        raise PipelineError("--host is empty; give an address, or leave the option out for 127.0.0.1")
    for name, holds, wanted in ranges:
        if not holds:
            raise PipelineError(f"--{name} is {getattr(args, name.replace('-', '_'))}; it must be {wanted}")
    if args.name and (len(args.bundle) > 1 or args.keep is not None):
        raise PipelineError("--name is for one model that stays open; others have their own names, or their directories'")
    if args.draft and (len(args.bundle) > 1 or args.keep is not None):
        raise PipelineError("--draft is for one model that stays open: leave --keep and other models out")


def origins(args: argparse.Namespace) -> list[str]:
    """Return the origins of --cors in the form that browsers send; PipelineError for an invalid
    one."""
    for origin in args.cors:
        if not re.fullmatch(r"\*|null|[a-z][a-z0-9+.-]*://[^/?#\s]+", origin):
            raise PipelineError(f"--cors is {origin!r}; give an origin as browsers send it, such as https://example.com, or *")
    return [origin.lower() for origin in args.cors]


def api_keys(args: argparse.Namespace) -> list[str]:
    """Return the keys of --api-key and of the environment; PipelineError for an empty one."""
    if not all(key.strip() for key in args.api_key):
        raise PipelineError("--api-key is empty; give a key, or leave the option out to serve without authentication")
    given = os.environ.get(KEY_VARIABLE)
    keys = [key.strip() for key in (given or "").split(",") if key.strip()]
    if given is not None and not keys:
        # An empty variable must not turn authentication off.
        raise PipelineError(f"{KEY_VARIABLE} is set but has no key; give keys with commas between them, or unset it")
    return [*args.api_key, *keys]

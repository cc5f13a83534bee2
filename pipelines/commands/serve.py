"""Serves one or several bundles over HTTP with OpenAI's API and Anthropic's, several requests at once, and a chat page at /.

A model that encodes texts has /v1/embeddings (input of strings or token ids, encoding_format, dimensions; besides
prompt_name, one of the model's prompts, and truncate, for texts longer than it takes). Of other models:

Endpoints: /v1/models, /v1/chat/completions and /v1/completions (streaming, logprobs, n, stop, seed, penalties,
logit_bias; besides OpenAI's fields top_k, min_p, repeat_penalty, ignore_eos, min_tokens, stop_token_ids, repetition_stop,
which ends a text that goes round in a circle, chat_template_kwargs, continue_final_message and structured_outputs), the same
chats by OpenAI's /v1/responses and Anthropic's /v1/messages and /v1/messages/count_tokens, /tokenize, /detokenize, /health,
/metrics for Prometheus, and /openapi.json, which describes all of these to tools. A field that cannot be honoured is refused
with status 400, which names it. What a reasoning model thinks is in reasoning_content.

What a request does not say of temperature, top_p, top_k, min_p and repeat_penalty is as the model's generation_config has
it, and else as in OpenAI's API; /v1/models shows it under "sampling".

A bundle compiled with --batch 4,8 decodes up to 8 sequences at once and reads the weights once for all of them; on one
without batch functions requests run one after another. What two prompts begin with is computed once, as long as it is
in the cache.

Of several bundles each is opened when a request first names it in its field "model" (the first of them where it names none),
while requests for the others go on, and is closed when none has for --keep seconds or another one needs its memory.
"""

import argparse
import os
import re
from ipaddress import ip_address

from castiron.pipelines.commands.generating import (
    add_bundle_argument,
    add_draft_argument,
    add_prefix_cache_arguments,
    add_special_argument,
    add_template_argument,
    prefix_store,
    template_args,
    trust_of,
)
from castiron.pipelines.errors import PipelineError
from castiron.pipelines.progress import say

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

Requests beyond --queue get status 503, larger ones than --max-body 413, prompts past the context 400 with the numbers.
SIGTERM or Ctrl-C answers new requests and /health with 503, lets those under way finish for --grace seconds and ends with
status 0. What is read next, and whose slots are whose, is in docs/serving.md.
"""
# Seconds without a request after which one of several models is closed.
KEEP = 300.0
KEY_VARIABLE = "CASTIRON_API_KEY"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_bundle_argument(parser, nargs="+")
    parser.add_argument("--host", default="127.0.0.1", metavar="ADDRESS", help="where to listen; 0.0.0.0 is everywhere "
                        "(default: 127.0.0.1, this machine alone)")  # fmt: skip
    parser.add_argument("--port", type=int, default=8000, metavar="N", help="default: 8000; 0 takes any that is free")
    parser.add_argument("--name", metavar="NAME", help="the model's name for clients (default: the bundle's own name, "
                        "and its directory's works too)")  # fmt: skip
    parser.add_argument("--api-key", action="append", default=[], metavar="KEY", help="require this key on every path "
                        f"but the page and /health; may be repeated; keys in the environment variable {KEY_VARIABLE}, with "
                        "commas between them, stay out of the process list")  # fmt: skip
    parser.add_argument("--cors", action="append", default=[], metavar="ORIGIN", help="let the pages of this origin ask, such "
                        "as https://example.com, or * for those of every site: with an API key, or where no harm is in "
                        "it; may be repeated (default: none but this server's own page)")  # fmt: skip
    parser.add_argument("--temperature", type=float, metavar="T", help="for requests that name none; 0 is greedy (default: "
                        "the model's own, from its generation_config, else 1, as OpenAI's API has it)")  # fmt: skip
    add_template_argument(parser)
    add_special_argument(parser)
    add_draft_argument(parser)
    add_prefix_cache_arguments(parser)
    parser.add_argument("--threads", type=int, metavar="N", help="CPU threads (default: one per physical core)")
    parser.add_argument("--shared-prefixes", action="store_true", help="read what prompts begin with once for all keys; how "
                        "soon an answer comes then tells one key what another has asked")  # fmt: skip
    limits = parser.add_argument_group("limits")
    limits.add_argument("--queue", type=int, default=64, metavar="N", help="sequences of one client that may wait for a slot, "
                        "and a quarter of those of all (default: 64)")  # fmt: skip
    limits.add_argument("--scheduling-policy", choices=("fair", "priority"), default="fair", help="who goes first: fair "
                        "shares the slots between clients, by key or else by address; with priority, vLLM's field of requests "
                        "decides before that, the lower first (default: fair)")  # fmt: skip
    limits.add_argument("--max-body", type=float, default=4.0, metavar="MB", help="largest request body (default: 4)")
    limits.add_argument("--timeout", type=float, default=600.0, metavar="S", help="longest that a request may take, in "
                        "seconds, waiting included (default: 600)")  # fmt: skip
    limits.add_argument("--grace", type=float, default=10.0, metavar="S", help="seconds that running requests have to "
                        "finish after SIGTERM (default: 10)")  # fmt: skip
    limits.add_argument("--keep", type=float, metavar="S", help="close a model that no request has used for so many seconds "
                        "(default: 300 of several models, of one never)")  # fmt: skip
    parser.add_argument("--quiet", action="store_true", help="do not log each request to stderr")


def main(args: argparse.Namespace) -> int:
    # Before the model is loaded, which takes longer than to say that a package is missing.
    from castiron.pipelines.casting.named import bundle_of
    from castiron.pipelines.generation.model_sampling import in_words
    from castiron.pipelines.measuring.memory import say_memory, slots_of
    from castiron.pipelines.serve.api import Api
    from castiron.pipelines.serve.app import Front, open_app
    from castiron.pipelines.serve.clients import Access
    from castiron.pipelines.serve.server import listen, serve, url
    from castiron.pipelines.serve.several import Several
    from castiron.pipelines.serve.text_api import Limits

    check(args)
    keys, pages = api_keys(args), origins(args)
    limits = Limits(args.timeout, int(args.max_body * 1e6), args.temperature, args.scheduling_policy == "priority")
    shared = {"threads": args.threads, "queue": args.queue, "limits": limits, "template_args": template_args(args),
              "parse_special": args.parse_special}  # fmt: skip
    with listen(args.host, args.port) as listening:
        local = ip_address(listening.getsockname()[0].partition("%")[0]).is_loopback
        bundles = [bundle_of(place, **trust_of(args)) for place in args.bundle]
        if len(bundles) > 1 or args.keep is not None:
            open_one = lambda bundle, name, metrics: open_app(
                bundle, name=name, store=prefix_store(args, bundle.manifest), metrics=metrics, **shared
            )
            several = Several(bundles, open_one, keep=KEEP if args.keep is None else args.keep, limits=limits)
            access = Access(keys, pages, args.shared_prefixes, local)
            front = Front(several, several, several.metrics, several.paths, access, args.quiet)
            names = ", ".join(model.name for model in several.models)
            say(f"{names} at {url(listening)} (each opened when a request names it)")
            serve(front, several, listening, args.grace)
            return 0
        (bundle,) = bundles
        draft = bundle_of(args.draft, **trust_of(args)) if args.draft else None
        say_memory(bundle.manifest, slots_of(bundle.manifest), draft and draft.manifest)
        app = open_app(
            bundle, name=args.name, api_keys=keys, quiet=args.quiet, cors=pages, store=prefix_store(args, bundle.manifest),
            shared_prefixes=args.shared_prefixes, local=local, draft=draft, **shared,
        )  # fmt: skip
        api, slots = app.api, app.api.engine.slots
        if isinstance(api, Api) and slots == 1:
            say("requests run one after another, because this bundle has no batch functions; compile with --batch 4,8 for "
                "up to 8 at once")  # fmt: skip
        how = "it encodes texts: /v1/embeddings"
        if isinstance(api, Api):
            how = f"{slots} sequence{'s' * (slots > 1)} at once, context {api.context}; "
            how += f"requests that name nothing else: {in_words(api.sampling)}"
        say(f"{api.names[0]} at {url(listening)} ({how})")
        serve(app, api.engine, listening, args.grace)
    return 0


def check(args: argparse.Namespace) -> None:
    """PipelineError, before anything is loaded, for numbers out of their ranges."""
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
        # To the system it is every address there is.
        raise PipelineError("--host is empty; give an address, or leave the option out for 127.0.0.1")
    for name, holds, wanted in ranges:
        if not holds:
            raise PipelineError(f"--{name} is {getattr(args, name.replace('-', '_'))}; it must be {wanted}")
    if args.name and (len(args.bundle) > 1 or args.keep is not None):
        raise PipelineError("--name is for one model that stays open; others have their own names, or their directories'")
    if args.draft and (len(args.bundle) > 1 or args.keep is not None):
        raise PipelineError("--draft is for one model that stays open: leave --keep and other models out")


def origins(args: argparse.Namespace) -> list[str]:
    """What --cors gives, as browsers write it; PipelineError for what none would send."""
    for origin in args.cors:
        if not re.fullmatch(r"\*|null|[a-z][a-z0-9+.-]*://[^/?#\s]+", origin):
            raise PipelineError(f"--cors is {origin!r}; give an origin as browsers send it, such as https://example.com, or *")
    return [origin.lower() for origin in args.cors]


def api_keys(args: argparse.Namespace) -> list[str]:
    """Of the command line and of the environment; PipelineError for an empty one."""
    keys = [*args.api_key, *(key.strip() for key in os.environ.get(KEY_VARIABLE, "").split(",") if key.strip())]
    if not all(keys):
        raise PipelineError("--api-key is empty; give a key, or leave the option out to require none")
    return keys

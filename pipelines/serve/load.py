"""Loads a running server and tells what batching and the prefix cache bring.

Batching: as many requests as --parallel one after another, and the same number at once, each with a prompt that the
server has not seen; then the prompts of the last round once more alone, whose texts must be the same. Prefix: the time
to the first token behind a new system message of about --prefix words, and behind the same one with another question.
All greedy.
"""

import argparse
import http.client
import json
import random
import re
import statistics
import sys
import time
import urllib.parse
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

EXAMPLES = """\
examples:
  castiron serve build/model --quiet &
  python -m castiron.pipelines.serve.load http://127.0.0.1:8000
  python -m castiron.pipelines.serve.load http://127.0.0.1:8000 --parallel 8 --tokens 256 --rounds 3 --json

--json prints one object: parallel, tokens, rounds, serial_tok_s and parallel_tok_s (all requests' tokens over the time
of all), ratio (medians of the rounds), texts_equal, ttft_ms and token_ms (medians for serial and parallel), prefix
(prompt_tokens, cached_tokens, ttft_ms_new, ttft_ms_shared).
"""
# In a stream, the first text of an answer.
TEXT = re.compile(rb'"content": ?"[^"]')
# Words that make prompts which share no beginning.
WORDS = (
    "river stone copper garden engine winter lantern harbour thread violin marble orchard signal desert kettle island "
    "hammer meadow glass tunnel feather bridge candle forest mirror anchor saddle comet basket ladder"
).split()


@dataclass
class Answer:
    """One streamed completion; seconds from the request to its first token and to its end."""

    text: str
    prompt_tokens: int
    cached_tokens: int
    tokens: int
    first: float
    whole: float


class Client:
    """Asks one server; a connection for each request."""

    def __init__(self, url: str, key: str | None):
        parts = urllib.parse.urlsplit(url if "//" in url else f"http://{url}")
        if parts.scheme != "http" or not parts.hostname:
            raise SystemExit(f"load: {url!r} is not an address such as http://127.0.0.1:8000")
        self.host, self.port = parts.hostname, parts.port or 80
        self.headers = {"Content-Type": "application/json", **({"Authorization": f"Bearer {key}"} if key else {})}

    def chat(self, messages: list[dict], tokens: int) -> Answer:
        body = {
            "messages": messages, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "stream": True,
            "stream_options": {"include_usage": True},
        }  # fmt: skip
        connection = http.client.HTTPConnection(self.host, self.port, timeout=600)
        start = time.perf_counter()
        connection.request("POST", "/v1/chat/completions", json.dumps(body), self.headers)
        response = connection.getresponse()
        if response.status != 200:
            raise SystemExit(f"load: status {response.status}: {response.read().decode(errors='replace')}")
        # Read as it comes and taken apart afterwards: this script shares the machine with the server that it measures.
        first, data = None, bytearray()
        while part := response.read1(1 << 16):
            data += part
            if first is None and TEXT.search(data):
                first = time.perf_counter() - start
        whole = time.perf_counter() - start
        connection.close()
        text, usage = [], None
        for line in data.splitlines():
            if not line.startswith(b"data: {"):
                continue
            chunk = json.loads(line[6:])
            if "error" in chunk:
                raise SystemExit(f"load: {chunk['error']['message']}")
            usage = chunk["usage"] or usage
            text += [choice["delta"].get("content") or "" for choice in chunk["choices"]]
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        return Answer("".join(text), usage["prompt_tokens"], cached, usage["completion_tokens"], first or whole, whole)


def question(rng: random.Random, words: int) -> str:
    return f"Write about {', '.join(rng.choice(WORDS) for _ in range(words))}."


def prompts(rng: random.Random, count: int, words: int) -> list[list[dict]]:
    """Different from the first word of the system message on: none finds more than the template's beginning cached."""
    return [
        [{"role": "system", "content": question(rng, 3)}, {"role": "user", "content": question(rng, words)}]
        for _ in range(count)
    ]


def measure_batching(client: Client, args: argparse.Namespace, rng: random.Random) -> dict:
    """Rates of both ways, and whether they tell the same."""
    rates, ttft, between = ({"serial": [], "parallel": []} for _ in range(3))
    asked, answers = [], []
    for _ in range(args.rounds):
        for way, workers in (("serial", 1), ("parallel", args.parallel)):
            asked = prompts(rng, args.parallel, args.words)
            start = time.perf_counter()
            with ThreadPoolExecutor(workers) as pool:
                answers = list(pool.map(lambda messages: client.chat(messages, args.tokens), asked))
            rates[way].append(sum(a.tokens for a in answers) / (time.perf_counter() - start))
            ttft[way] += [a.first * 1e3 for a in answers]
            between[way] += [(a.whole - a.first) / (a.tokens - 1) * 1e3 for a in answers if a.tokens > 1]
    alone = [client.chat(messages, args.tokens).text for messages in asked]
    median = {way: statistics.median(values) for way, values in rates.items()}
    return {
        "serial_tok_s": round(median["serial"], 1),
        "parallel_tok_s": round(median["parallel"], 1),
        "ratio": round(median["parallel"] / median["serial"], 2),
        "texts_equal": alone == [a.text for a in answers],
        "ttft_ms": {way: round(statistics.median(values), 1) for way, values in ttft.items()},
        "token_ms": {way: round(statistics.median(values), 2) for way, values in between.items() if values},
    }


def measure_prefix(client: Client, args: argparse.Namespace, rng: random.Random) -> dict:
    """Times to the first token behind a new and behind a known system message."""
    new, shared = [], []
    for _ in range(args.rounds):
        system = {"role": "system", "content": question(rng, args.prefix)}
        for times in (new, shared):
            answer = client.chat([system, {"role": "user", "content": question(rng, args.words)}], 2)
            times.append(answer.first * 1e3)
    return {
        "prompt_tokens": answer.prompt_tokens,
        "cached_tokens": answer.cached_tokens,
        "ttft_ms_new": round(statistics.median(new), 1),
        "ttft_ms_shared": round(statistics.median(shared), 1),
    }


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m castiron.pipelines.serve.load", description=__doc__, epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("url", metavar="URL", help="the server: http://127.0.0.1:8000")
    parser.add_argument("--parallel", type=int, default=8, metavar="N", help="requests at once (default: 8)")
    parser.add_argument("--tokens", type=int, default=128, metavar="N", help="tokens of each answer (default: 128)")
    parser.add_argument("--words", type=int, default=12, metavar="N", help="words of each question (default: 12)")
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="of which medians are told (default: 3)")
    parser.add_argument("--prefix", type=int, default=400, metavar="N", help="words of a shared system message; 0 "
                        "leaves that out (default: 400)")  # fmt: skip
    parser.add_argument("--api-key", metavar="KEY", help="what the server asks for")
    parser.add_argument("--seed", type=int, metavar="N", help="of the prompts (default: others every time)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args(argv)
    client, rng = Client(args.url, args.api_key), random.Random(args.seed)
    try:
        client.chat([{"role": "user", "content": "Hello"}], 2)
        result = {"parallel": args.parallel, "tokens": args.tokens, "rounds": args.rounds}
        result |= measure_batching(client, args, rng)
        if args.prefix:
            result["prefix"] = measure_prefix(client, args, rng)
    except OSError as error:
        print(f"load: no answer from {args.url}: {error.strerror or error}", file=sys.stderr)
        return 1
    print(json.dumps(result) if args.json else table(result))
    return 0 if result["texts_equal"] else 1


def table(result: dict) -> str:
    """The result for a person."""
    lines = [f"{result['parallel']} requests of {result['tokens']} tokens, medians of {result['rounds']} rounds",
             f"{'':<20}{'tok/s':>10}{'first ms':>10}{'ms/token':>10}"]  # fmt: skip
    for way, name in (("serial", "one after another"), ("parallel", "at once")):
        token = result["token_ms"].get(way, 0.0)
        lines.append(f"{name:<20}{result[f'{way}_tok_s']:>10.1f}{result['ttft_ms'][way]:>10.0f}{token:>10.1f}")
    equal = "the same" if result["texts_equal"] else "DIFFERENT"
    lines.append(f"at once is {result['ratio']:.2f} times as fast; texts are {equal}")
    if prefix := result.get("prefix"):
        lines.append(f"first token behind a new system message after {prefix['ttft_ms_new']:.0f} ms, behind a shared one "
                     f"({prefix['cached_tokens']} of {prefix['prompt_tokens']} tokens) after "
                     f"{prefix['ttft_ms_shared']:.0f} ms")  # fmt: skip
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())

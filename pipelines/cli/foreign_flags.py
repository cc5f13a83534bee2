"""Flags of llama.cpp, vLLM, mlx-lm and Ollama: the flags of castiron that they stand for, or what to do instead."""

import argparse
from collections.abc import Iterator, Sequence

# Castiron's flag -> flags of other tools, and former ones of castiron, with the same meaning. One that stands for two flags
# means the one that the command has.
SAME = {
    "--threads": "-t",
    "--context": "--ctx-size --max-model-len --n-ctx --num-ctx",
    "--max-tokens": "--predict --n-predict --num-predict --max-new-tokens",
    "--seed": "-s",
    "--repeat-penalty": "--repetition-penalty",
    "--system": "-sys --system-prompt",
    "--stop": "-r --reverse-prompt",
    "--draft-model": "--draft -md --model-draft --spec-draft-model",
    "--json-schema": "-jf --json-schema-file",
    "--grammar": "--grammar-file",
    "--prefix-cache": "--slot-save-path",
    "--name": "-a --alias --served-model-name",
    "--quiet": "--disable-log-requests",
    "--adapter": "--lora --adapter-path",
    "--batch": "-np --parallel --max-num-seqs",
    "--n-gpu-layers": "--gpu-layers",
    "-m": "-hf -hfr --hf-repo",
    "--save-temps": "--keep",
    "--keep-alive": "--keep",
    "--kv-cache-type": "--cache",
    "--speculative": "--speculate",
    "--verify-widths": "--speculate",
    "--shutdown-timeout": "--grace",
    "--max-queue": "--queue",
}  # fmt: skip
# Command -> flags that ask for what it does anyway, with the number of their values.
ALWAYS = {
    "run": {"-no-cnv --no-conversation -st --single-turn --no-display-prompt --jinja --simple-io": 0},
    "chat": {"-cnv --conversation -i --interactive --jinja --simple-io": 0},
    "serve": {"--jinja --metrics --slots --embedding --embeddings --rerank --reranking --cache-prompt -cb --cont-batching": 0,
              "--enable-prefix-caching --enable-chunked-prefill --enable-auto-tool-choice": 0,
              "--tool-call-parser --reasoning-parser": 1},
}  # fmt: skip
# Flags of other tools, and what to do instead.
INSTEAD = {
    "-cnv --conversation -i --interactive": "run castiron chat",
    "-no-cnv --no-conversation": "run castiron run",
    "-np --parallel --max-num-seqs": "compile with castiron compile --batch 4,8",
    "-ctk --cache-type-k -ctv --cache-type-v --kv-cache-dtype": "compile with castiron compile --kv-cache-type q8_0",
    "--lora --lora-scaled --adapter-path --enable-lora --lora-modules": "compile with castiron compile --adapter DIR",
    "--dtype --quantization": "compile with castiron compile --weights TYPE",
    "-j": "write the schema to a file, and give --json-schema FILE",
    "--prompt-cache": "give --prefix-cache DIR",
    "--chat-template-kwargs --default-chat-template-kwargs -rea --reasoning --think": "give --template-arg NAME=VALUE",
    "--chat-template --chat-template-file": "put chat_template.jinja next to the weights, and compile again",
    "--reasoning-budget": "set reasoning_budget_tokens in requests to castiron serve",
    "--presence-penalty --frequency-penalty": "set it in requests to castiron serve",
    "--api-key-file": "set CASTIRON_API_KEY=KEY,KEY",
    "--cors-origins --allowed-origins": "give --cors ORIGIN",
    "--ssl-key-file --ssl-cert-file --ssl-keyfile --ssl-certfile": "put a reverse proxy in front of the server",
    "--keepalive": "give --keep-alive SECONDS",
    "--samplers --sampler-seq --sampling-seq --mirostat --mirostat-lr --mirostat-ent --typical --typical-p --xtc-probability"
    " --xtc-threshold --dry-multiplier --top-nsigma --top-n-sigma --dynatemp-range": "no such sampler; leave it out",
    "-fa --flash-attn --mlock --no-mmap -b --batch-size -ub --ubatch-size -tb --threads-batch --numa --prio --no-warmup"
    " -nkvo --no-kv-offload -cmoe --cpu-moe -ncmoe --n-cpu-moe -sm --split-mode -ts --tensor-split -mg --main-gpu"
    " -tp --tensor-parallel-size --gpu-memory-utilization --enforce-eager --swap-space --trust-remote-code"
    " --rope-scaling --rope-freq-base --rope-freq-scale --no-context-shift --context-shift": "not needed; leave it out",
}  # fmt: skip
OWN = [(flag, own) for own, flags in SAME.items() for flag in flags.split()]
ADVICE = {flag: advice for flags, advice in INSTEAD.items() for flag in flags.split()}


def translated(parser: argparse.ArgumentParser, command: str, argv: Sequence[str]) -> Iterator[str]:
    """Yield the arguments with castiron's own flags; usage error for a flag of `ADVICE`."""
    known = parser._option_string_actions
    own = {flag: name for flag, name in OWN if name in known}
    always = {flag: values for flags, values in ALWAYS.get(command, {}).items() for flag in flags.split()}
    words = iter(argv)
    for word in words:
        if word == "--":
            yield word
            break
        flag, equals, value = word.partition("=")
        if flag in known:
            yield word
        elif flag in always:
            for _ in range(0 if equals else always[flag]):
                next(words, None)
        elif flag in own:
            yield f"{own[flag]}{equals}{value}"
        elif flag in ADVICE:
            parser.error(f"{flag} is not an option of this command: {ADVICE[flag]}")
        else:
            yield word
    yield from words

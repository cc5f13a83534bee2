"""Run Codex, Claude Code and opencode against `castiron serve`, and time first tokens.

`python -m tests.agents BUNDLE NODE_MODULES [AGENT ...]` runs each agent twice on a small task in a
new folder, with a new server each time, and prints the time to the first token of its requests, the
cached tokens, and whether the task was done. NODE_MODULES is a folder of npm with the packages of
docs/agents.md. Nothing outside a temporary folder is written, and only 127.0.0.1 is reached.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.support.served import Served, free_port, running

NAME, CONTEXT = "coder", 32768
TASKS = {
    "codex": "Run `sed -n 2p words.txt > second.txt` in the shell.",
    "claude": "Use the Bash tool to run: sed -n 2p words.txt > second.txt",
    "opencode": "Create the file second.txt with the content bravo.",
}
# Other options of the server.
SERVER = {"claude": ["--repeat-penalty", "1.1"]}
CODEX = """
model = "coder"
model_provider = "castiron"
model_context_window = 32768
web_search = "disabled"
approval_policy = "never"
sandbox_mode = "danger-full-access"
check_for_update_on_startup = false
[analytics]
enabled = false
[model_providers.castiron]
name = "castiron"
base_url = "URL/v1"
wire_api = "responses"
stream_idle_timeout_ms = 900000
"""
CLAUDE = {
    "ANTHROPIC_API_KEY": "none", "ANTHROPIC_MODEL": NAME, "ANTHROPIC_DEFAULT_HAIKU_MODEL": NAME, "API_TIMEOUT_MS": "900000",
    "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1", "CLAUDE_CODE_MAX_CONTEXT_TOKENS": str(CONTEXT),
    "CLAUDE_CODE_MAX_OUTPUT_TOKENS": "4096", "DISABLE_AUTOUPDATER": "1",
}  # fmt: skip


def command(agent: str, url: str, home: Path, task: str) -> tuple[list[str], dict[str, str]]:
    """Write the agent's settings below `home`; return its command and environment variables."""
    if agent == "codex":
        (home / ".codex").mkdir(exist_ok=True)
        (home / ".codex/config.toml").write_text(CODEX.replace("URL", url))
        return ["codex", "exec", "--skip-git-repo-check", task], {}
    if agent == "claude":
        options = ["--bare", "--tools", "Bash", "--allowedTools", "Bash"]
        return ["claude", "-p", task, *options], {**CLAUDE, "ANTHROPIC_BASE_URL": url}
    provider = {
        "npm": "@ai-sdk/openai-compatible", "options": {"baseURL": f"{url}/v1", "apiKey": "none", "timeout": False},
        "models": {NAME: {"limit": {"context": CONTEXT, "output": 4096}}},
    }  # fmt: skip
    model = f"castiron/{NAME}"
    settings = {"autoupdate": False, "share": "disabled", "model": model, "small_model": model, "permission": {"*": "allow"},
                "enabled_providers": ["castiron"], "provider": {"castiron": provider}}  # fmt: skip
    (home / ".config/opencode").mkdir(parents=True, exist_ok=True)
    (home / ".config/opencode/opencode.json").write_text(json.dumps(settings))
    return ["opencode", "run", task], {}


def run(agent: str, server: Served, args: argparse.Namespace, home: Path, task: str) -> None:
    """Run the agent in its folder; print what it did, and the server's line of each request."""
    work = home / "work"
    work.mkdir(exist_ok=True)
    (work / "words.txt").write_text("alpha\nbravo\ncharlie\n")
    (work / "second.txt").unlink(missing_ok=True)
    words, variables = command(agent, server.url, home, task)
    started, output = time.monotonic(), home / "output.txt"
    with output.open("wb") as file:
        process = subprocess.Popen(
            [args.node_modules / ".bin" / words[0], *words[1:]], cwd=work, stdin=subprocess.DEVNULL, stdout=file, stderr=file,
            env={**os.environ, "HOME": str(home), "PWD": str(work), **variables},
        )  # fmt: skip
        try:
            status: object = process.wait(args.seconds)
        except subprocess.TimeoutExpired:
            process.kill()
            status = f"stopped after {args.seconds} s"
    second = work / "second.txt"
    done = second.exists() and second.read_text().strip() == "bravo"
    print(f"{agent}: exit status {status}, {time.monotonic() - started:.1f} s, second.txt is {'right' if done else 'wrong'}")
    print("\n".join(re.findall(r"POST .*", server.errors)[: args.requests]))
    if args.verbose:
        print(output.read_text(errors="replace")[-2000:], flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("node_modules", type=Path)
    parser.add_argument("agents", nargs="*", default=list(TASKS))
    parser.add_argument("--task", help="another task (default: one that each agent does with a model of 0.5B)")
    parser.add_argument("--starts", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=600, help="stop an agent after this time")
    parser.add_argument("--requests", type=int, default=9, help="print at most so many requests of a start")
    parser.add_argument("--folder", type=Path, help="folder of settings and cache (default: a temporary one)")
    parser.add_argument("--verbose", action="store_true", help="also print the end of what the agent writes")
    args = parser.parse_intermixed_args()
    with tempfile.TemporaryDirectory() as made:
        folder = (args.folder or Path(made)).absolute()
        for agent in args.agents:
            home = folder / agent
            home.mkdir(parents=True, exist_ok=True)
            for _ in range(args.starts):
                options = ["-c", str(CONTEXT), "--name", NAME, "--temperature", "0", "--port", str(free_port())]
                options += SERVER.get(agent, [])
                start = [sys.executable, "-m", "castiron", "serve", args.bundle, *options]
                cache = {**os.environ, "CASTIRON_CACHE": str(folder / "cache")}
                with running(start, home / "serve.log", cache, Path(__file__).parents[1]) as server:
                    run(agent, server, args, home, args.task or TASKS[agent])


if __name__ == "__main__":
    main()

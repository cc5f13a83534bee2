"""A replacement for curl with the options that pages and tests use, for machines without curl.

`put_on_path` puts a program `curl` that runs this file on the PATH of tests and their shells.
"""

from __future__ import annotations

import argparse
import http.client
import os
import sys
from pathlib import Path
from urllib.parse import urlsplit


def put_on_path(folder: Path) -> None:
    program = folder / "curl"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{__file__}" "$@"\n')
    program.chmod(0o755)
    os.environ["PATH"] = f"{folder}{os.pathsep}{os.environ['PATH']}"


def main() -> int:
    parser = argparse.ArgumentParser(prog="curl")
    parser.add_argument("url")
    parser.add_argument("-H", "--header", action="append", default=[])
    parser.add_argument("-d", "--data")
    parser.add_argument("-f", "--fail", action="store_true")
    parser.add_argument("--max-time", type=float)
    parser.add_argument("-w", "--write-out", default="")
    for ignored in ("-s", "-S", "-N"):
        parser.add_argument(ignored, action="store_true")
    parser.add_argument("--silent", action="store_true")
    options = parser.parse_args()
    url = urlsplit(options.url)
    headers = {"Content-Type": "application/x-www-form-urlencoded"} if options.data is not None else {}
    headers |= {name: value.strip() for name, _, value in (line.partition(":") for line in options.header)}
    connection = http.client.HTTPConnection(url.hostname, url.port, timeout=options.max_time)
    target = url._replace(scheme="", netloc="").geturl() or "/"
    method, body = ("GET", None) if options.data is None else ("POST", options.data.encode())
    connection.request(method, target, body, headers, encode_chunked="Transfer-Encoding" in headers)
    answer = connection.getresponse()
    if options.fail and answer.status >= 400:
        return 22
    while chunk := answer.read1(65536):
        sys.stdout.buffer.write(chunk)
        sys.stdout.buffer.flush()
    sys.stdout.write(options.write_out.replace("\\n", "\n").replace("%{http_code}", str(answer.status)))
    return 0


if __name__ == "__main__":
    sys.exit(main())

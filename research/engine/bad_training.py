"""A training whose inference server misbehaves: what is printed, what is lost.

    python research/engine/bad_training.py FOLDER --server URL

A proxy in front of a healthy server, which has tiny/model, commits one fault. Each fault gets a
training of four steps; where it ends early, `--resume` continues it on the healthy server. The
table says how it ended and whether every rollout is there once.
"""

import argparse
import http.server
import json
import os
import pathlib
import subprocess
import sys
import threading
import urllib.error
import urllib.request

ROOT = pathlib.Path(__file__).resolve().parents[2]
FAULTS = {
    "none": "nothing",
    "fails": "one request in four fails with HTTP 500",
    "dies": "it drops every connection once an adapter is loaded, from the second on",
    "base": "it answers with the base instead of the adapter",
    "text": "it sends text without token ids",
    "cut": "it cuts the prompt to its last 32 tokens",
}


class Proxy(http.server.ThreadingHTTPServer):
    """Passes requests on to the healthy server, with one fault."""

    daemon_threads = True

    def __init__(self, target: str, fault: str):
        super().__init__(("127.0.0.1", 0), Handler)
        self.target, self.fault, self.count, self.loads = target, fault, 0, 0
        self.base = json.load(urllib.request.urlopen(f"{target}/models"))["data"][0]["id"]


class Handler(http.server.BaseHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        self.forward(None)

    def do_POST(self) -> None:
        self.forward(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

    def forward(self, body: dict | None) -> None:
        proxy: Proxy = self.server  # type: ignore[assignment]
        path, completing = self.path.removeprefix("/v1"), self.path.endswith("/completions")
        if completing and body is not None:
            proxy.count += 1
            if proxy.fault == "dies" and proxy.loads > 1:
                return  # the connection closes
            if proxy.fault == "fails" and proxy.count % 4 == 0:
                self.reply(500, b"{}")
                return
            if proxy.fault == "base":
                body["model"] = proxy.base
            if proxy.fault == "cut" and "logprobs" in body:
                body["prompt"] = body["prompt"][-32:]
        proxy.loads += path == "/load_lora_adapter"
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(proxy.target + path, data, headers)
        try:
            answer = urllib.request.urlopen(request)
        except urllib.error.HTTPError as e:
            answer = e
        with answer:
            text = answer.read()
        if completing and proxy.fault == "text" and answer.status == 200:
            content = json.loads(text)
            for choice in content["choices"]:
                choice.pop("token_ids", None)
            text = json.dumps(content).encode()
        self.reply(answer.status, text)

    def reply(self, status: int, text: bytes) -> None:
        self.send_response(status)
        self.end_headers()
        self.wfile.write(text)


def run(arguments: list[str]) -> tuple[int, str]:
    """A program's exit code and its last line of stderr."""
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "sgsd.py", *arguments]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    lines = done.stderr.strip().splitlines()
    return done.returncode, lines[-1] if lines else ""


def rollouts(out: pathlib.Path) -> list[tuple[int, int]]:
    """(step, place in the batch) of each rollout."""
    path = out / "rollouts.jsonl"
    rows = [json.loads(line) for line in open(path)] if path.exists() else []
    return [(row["step"], row["index"]) for row in rows]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--server", required=True)
    args = parser.parse_args()
    folder = args.folder.resolve()
    print("| the server | exit code | the last line | steps made | after --resume |")
    print("|---|---|---|---|---|")
    for fault, words in FAULTS.items():
        out = folder / fault
        proxy = Proxy(args.server, fault)
        threading.Thread(target=proxy.serve_forever, daemon=True).start()
        plan = ["--preset", "tiny", "--steps", "4", "--bank", "banks/word_problems.json"]
        plan += ["--evolve-every", "0", "--audit-every", "0", "--eval-data=", "--out", str(out)]
        url = f"http://127.0.0.1:{proxy.server_port}/v1"
        code, last = run([*plan, "--server", url])
        proxy.shutdown()
        last = last.replace(str(folder), "FOLDER").replace(url, "URL") if code else ""
        made = len({step for step, _ in rollouts(out)})
        after = ""
        if code:
            run(["--resume", str(out), "--server", args.server])
            each = rollouts(out)
            whole = len(each) == len(set(each)) == 4 * 16
            after = "every rollout once" if whole else f"{len(each)} rollouts"
        print(f"| {words} | {code} | {last} | {made} | {after} |", flush=True)


if __name__ == "__main__":
    main()

"""A small inference server in a thread: what vLLM does of the protocol in lib/served.py."""

import contextlib
import http.server
import json
import threading

STOPS = [265, 263]
DROP = "drop the connection"


class Engine(http.server.ThreadingHTTPServer):
    """Serves "base" and adapters. `answer` makes a reply to a completion: (status, JSON) or DROP.

    By itself an answer is three ids that differ from prompt to prompt.
    """

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_port}/v1"
        self.bases = [{"id": "base", "owned_by": "vllm", "root": "base", "parent": None}]
        self.adapters, self.calls, self.keys_seen = {}, [], []
        self.answer = self.sampled

    def sampled(self, body):
        return 200, choices(token_ids=[sum(body["prompt"]) % 200, 7, STOPS[0]])

    def bodies(self, path="/v1/completions"):
        """What was asked there, in order."""
        return [body for where, body in self.calls if where == path]

    def get(self, path):
        listed = list(self.bases)
        for name, folder in self.adapters.items():
            listed.append({"id": name, "root": folder, "parent": self.bases[0]["id"]})
        return 200, {"data": listed}

    def post(self, path, body):
        if path == "/v1/load_lora_adapter":
            if body["lora_name"] in self.adapters:
                return 400, {"error": "already loaded"}
            self.adapters[body["lora_name"]] = body["lora_path"]
            return 200, "Success"
        if path == "/v1/unload_lora_adapter":
            there = self.adapters.pop(body["lora_name"], None)
            return (200, "Success") if there else (404, {"error": "not found"})
        if body["model"] not in {base["id"] for base in self.bases} | {*self.adapters}:
            return 404, {"error": "no such model"}
        return self.answer(body)


class Handler(http.server.BaseHTTPRequestHandler):
    def log_message(self, *_):
        pass

    def do_GET(self):
        self.server.keys_seen.append(self.headers.get("Authorization"))
        self.send(self.server.get(self.path))

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.calls.append((self.path, body))
        self.send(self.server.post(self.path, body))

    def send(self, reply):
        if reply == DROP:
            return
        status, value = reply
        text = value if isinstance(value, str) else json.dumps(value)
        with contextlib.suppress(OSError):  # nobody may be waiting any more
            self.send_response(status)
            self.end_headers()
            self.wfile.write(text.encode())


def choices(reason="stop", usage=None, **fields):
    """The body of a reply."""
    return {"choices": [{"finish_reason": reason, **fields}], "usage": usage}


@contextlib.contextmanager
def serving():
    """An engine that runs in a thread for as long as the block does."""
    with Engine() as engine:
        threading.Thread(target=engine.serve_forever, args=[0.01], daemon=True).start()
        yield engine
        engine.shutdown()

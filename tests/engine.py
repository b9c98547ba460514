"""A small inference server in a thread, for the tests of extras/served.py."""

import contextlib
import http.server
import json

STOPS = [265, 263]


class Engine(http.server.ThreadingHTTPServer):
    """Serves "base" and adapters. `answer` makes the reply to a completion: (status, JSON).

    Anything but such a pair drops the connection.
    """

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_port}/v1"
        self.base = {"id": "base", "owned_by": "vllm", "root": "base", "max_model_len": 4096}
        self.adapters, self.calls, self.keys_seen = {}, [], []
        self.answer = self.sampled

    def sampled(self, body):
        """Ids that differ from prompt to prompt, and a log-probability for each."""
        ids = [sum(body["prompt"]) % 200, 7, STOPS[0]]
        return 200, choices(token_ids=ids, logprobs={"token_logprobs": [-0.5, -1.5, -0.25]})

    def bodies(self, path="/v1/completions"):
        return [body for where, body in self.calls if where == path]

    def get(self, path):
        adapters = [{"id": name, "root": folder} for name, folder in self.adapters.items()]
        return 200, {"data": [self.base, *adapters]}

    def post(self, path, body):
        if path == "/v1/load_lora_adapter":
            if body["lora_name"] in self.adapters:
                return 400, {"error": "already loaded"}
            self.adapters[body["lora_name"]] = body["lora_path"]
            return 200, "Success"
        if path == "/v1/unload_lora_adapter":
            there = self.adapters.pop(body["lora_name"], None)
            return (200, "Success") if there else (404, {"error": "not found"})
        if body["model"] not in {self.base["id"], *self.adapters}:
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
        if not isinstance(reply, tuple):
            return
        status, value = reply
        text = value if isinstance(value, str) else json.dumps(value)
        with contextlib.suppress(OSError):  # nobody may be waiting any more
            self.send_response(status)
            self.end_headers()
            self.wfile.write(text.encode())


def choices(reason="stop", usage=None, **fields):
    return {"choices": [{"finish_reason": reason, **fields}], "usage": usage}

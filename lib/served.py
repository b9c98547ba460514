"""A client of one OpenAI-compatible inference server, in the place of `rollout.stream`.

Prompts travel to /v1/completions as token ids, never as text: a server's chat template is not ours.
The sampled ids come back (vLLM), else its text is tokenized. Such samples come from another sampler
than `generate`, and the two are never mixed silently (S27).

Traps. An engine's prefix cache goes by the adapter's name: give each set of weights a new name
(vllm#42125). Unload an adapter only when no request is under way (vllm#13698). An adapter can be
accepted and not act (vllm#55193): then the samples are the base's.
"""

import contextlib
import functools
import http.client
import json
import math
import os
import re
import sys
import textwrap
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Any

PAUSES = (1, 2, 4, 8, 16, 32, 64, 0)  # seconds after each try of a request; none after the last
REPORT_S = 60.0  # from one line on failed tries to the next
QUICK_S = 300.0  # the longest wait for any other reply than a completion
LORA_HINT = "vLLM needs VLLM_ALLOW_RUNTIME_LORA_UPDATING=True, --enable-lora and --max-lora-rank"


class Server:
    """One server of a base model, and of adapters that are loaded while it runs.

    url: such as http://localhost:8000/v1. model: the base's directory or hub id. tokenizer: the
    base's. stops: ids that end a completion. timeout_s: the longest wait for one.
    Where the server does not reply, refuses, or replies something unexpected, it is an OSError of
    one line.
    """

    def __init__(
        self, url: str, model: str, tokenizer: Any, stops: Sequence[int], *, timeout_s=3600.0
    ):
        if not re.fullmatch(r"https?://[^/\s]+/v1", url):
            raise ValueError(f"server {url}: give an address such as http://localhost:8000/v1")
        self.url, self.model, self.timeout_s = url, model, timeout_s
        self.tokenizer, self.stops = tokenizer, stops
        self.base = model  # its name on the server, after `check`
        self.engine = ""  # what the server calls itself, after `check`
        self.reported = -math.inf  # when a failed try was last printed, in time.monotonic's seconds

    def check(self) -> None:
        """Find the model's name on the server. One that serves a single base is taken at its word.

        OSError, with what it serves, if it has several bases and none of this path or id.
        """
        text = self._ask("/models")
        models = self._read(text, lambda reply: {entry["id"]: entry for entry in reply["data"]})
        bases = {name: entry for name, entry in models.items() if not entry.get("parent")}
        wanted = {self.model, whole_name(self.model)}
        for name, entry in bases.items():
            if len(bases) == 1 or wanted & {name, entry.get("root")}:
                self.base, self.engine = name, str(entry.get("owned_by", "unknown"))
                return
        raise OSError(f"{self.url}: serves {', '.join(bases) or 'nothing'}, not {self.model}")

    def load(self, name: str, folder: str) -> None:
        """Load an adapter under a name that the server never had."""
        body = {"lora_name": name, "lora_path": str(Path(folder).resolve())}
        self._ask("/load_lora_adapter", body, hint=f"; {LORA_HINT}")

    def unload(self, name: str) -> None:
        """Unload an adapter. No error where that fails: a server that is gone has none."""
        with contextlib.suppress(OSError):
            self._ask("/unload_lora_adapter", {"lora_name": name})

    def stream(
        self, jobs: Sequence[Any], sampling, rows: int, adapter: str = ""
    ) -> Iterator[list[Any]]:
        """Jobs as they are done, one at a time, with the sampled ids and the stop id.

        jobs: `rollout.Job`s; their ids are filled in. sampling: .temperature, .top_p, .top_k. rows:
        requests under way at a time. adapter: its name; "" is the base.
        A request that fails is tried again after pauses. An error that they do not mend is raised
        when the replies under way have been yielded.
        """
        errors: list[OSError] = []
        ending = threading.Event()

        def complete(job):
            """In a thread: fill in a job; None after an error of this one or another."""
            if ending.is_set():
                return None
            try:
                return self._complete(job, self._body(job, sampling, adapter), ending)
            except OSError as e:
                errors.append(e)
                ending.set()  # jobs that wait for their next try give up
                return None

        # Its threads are daemons: a program that is interrupted does not wait for replies.
        with ThreadPool(max(1, min(rows, len(jobs)))) as pool:
            try:
                for job in pool.imap_unordered(complete, jobs):
                    if job is not None:
                        yield [job]
            finally:
                ending.set()
        if errors:
            raise errors[0]

    def _body(self, job, sampling, adapter: str) -> dict[str, Any]:
        """A request with every field of sampling, so that a server's own settings have no say."""
        body: dict[str, Any] = {"model": adapter or self.base, "prompt": job.prompt}
        body |= {"max_tokens": job.left, "stop_token_ids": list(self.stops)}
        body |= {"temperature": sampling.temperature, "top_p": sampling.top_p}
        body |= {"top_k": sampling.top_k or -1, "min_p": 0.0, "repetition_penalty": 1.0}
        body |= {"presence_penalty": 0.0, "frequency_penalty": 0.0}
        body |= {"skip_special_tokens": False, "return_token_ids": True}
        return body

    def _fill(self, job, reply: dict) -> bool:
        """Fill in a reply's ids; False if it was broken off."""
        choice, usage = reply["choices"][0], reply.get("usage") or {}
        reason, ids = choice["finish_reason"], choice.get("token_ids")
        if reason not in ("stop", "length"):
            return False
        prompt_tokens = usage.get("prompt_tokens", len(job.prompt))
        if prompt_tokens != len(job.prompt):
            raise ValueError(f"it read {prompt_tokens} of {len(job.prompt)} prompt tokens")
        count = usage.get("completion_tokens", job.left) if ids is None else len(ids)
        if ids is None:
            ids = self.tokenizer.encode(choice["text"], add_special_tokens=False)
        elif count > job.left or not all(type(token) is int and token >= 0 for token in ids):
            raise ValueError(f"token_ids must be at most {job.left} ids")
        if reason == "length" and count < job.left:  # it would count as cut at our own limit
            raise ValueError(f"cut after {count} of {job.left} tokens, by a limit of its own")
        if reason == "stop" and not {*ids[-1:]} & {*self.stops}:
            ids = [*ids, *self.stops[:1]]  # some servers leave it out
        job.ids, job.left = ids, 0
        return True

    def _complete(self, job, body: dict[str, Any], ending: threading.Event) -> Any:
        """The job, filled in after a limited number of tries; none follows once `ending` is set."""
        for pause in PAUSES:
            status, text = self._request("/completions", body, self.timeout_s)
            if status == 200 and self._read(text, functools.partial(self._fill, job)):
                return job
            cause = f"HTTP {status}: {_brief(text)}"
            is_refused = 400 <= status < 500 and status != 429
            if pause and not is_refused and time.monotonic() > self.reported + REPORT_S:
                self.reported = time.monotonic()
                print(f"{self.url}: {cause}; trying again", file=sys.stderr)
            if not pause or is_refused or ending.wait(pause):
                break
        raise OSError(f"{self.url}: no completion: {cause}")

    def _read(self, text: str, read: Callable[[dict], Any]) -> Any:
        try:
            return read(json.loads(text))
        except (ValueError, LookupError, TypeError, AttributeError) as e:
            cause = f"unexpected reply from the server ({type(e).__name__}: {e})"
            raise OSError(f"{self.url}: {cause}: {_brief(text)}") from None

    def _ask(self, path: str, body: dict | None = None, hint: str = "") -> str:
        """The reply to one request, which is not tried again."""
        status, text = self._request(path, body, QUICK_S)
        if status != 200:
            raise OSError(f"{self.url}: no success at {path}: HTTP {status}: {_brief(text)}{hint}")
        return text

    def _request(self, path: str, body: dict | None, timeout_s: float) -> tuple[int, str]:
        """HTTP status and text of a reply; 0 and why there is none.

        OSError if nothing comes for the whole time: it is not worth another wait.
        """
        headers = {"Content-Type": "application/json"}
        key = os.environ.get("OPENAI_API_KEY", "").strip()
        if not (key.isascii() and key.isprintable()):
            raise ValueError("OPENAI_API_KEY has characters that no header may have")
        if key:
            headers["Authorization"] = f"Bearer {key}"
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, headers)
        try:
            try:
                reply = urllib.request.urlopen(request, timeout=timeout_s)
            except urllib.error.HTTPError as e:  # a reply as well
                reply = e
            with reply:
                return reply.status, reply.read().decode("utf-8", "replace")
        except (OSError, http.client.HTTPException) as e:
            cause = getattr(e, "reason", e)
            if isinstance(cause, TimeoutError):
                raise OSError(f"{self.url}: no reply within {timeout_s:g} s") from None
            return 0, f"{type(cause).__name__}: {cause}"


def whole_name(name: str) -> str:
    """A directory's whole path, so that two names of one model are equal; a hub id as it is."""
    return str(Path(name).resolve()) if Path(name).exists() else name


def _brief(text: str) -> str:
    """A text in one line of at most 300 characters."""
    return textwrap.shorten(text, 300, placeholder=" ...")

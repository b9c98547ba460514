"""A client of one OpenAI-compatible inference server, in the place of `rollout.stream`.

We send ids to /v1/completions and get ids back, never text: a server's chat template is not ours.
A server is another sampler than `generate`, and we never mix their samples silently (S27).

Traps. An engine finds its prefix cache by the adapter's name: give each set of weights a new name
(vllm#42125). Unload an adapter only when no request is under way (vllm#13698). A server may accept
an adapter and not apply it (vllm#55193): then the samples are the base's.
"""

import contextlib
import os
import textwrap
import uuid
from collections.abc import Iterator, Sequence
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Any

import requests
import urllib3

PAUSE_S = 1.0  # we repeat a failed completion at once, then after 2, 4, ... 64 times as long
urllib3.connectionpool.log.setLevel("ERROR")  # else it prints each try of each request


class Server:
    """One server of a base model, and of adapters that are loaded while it runs.

    url: such as http://localhost:8000/v1. model: the base's folder or hub id. stops: ids that end a
    completion. context: the model's, in tokens; a completion ends with it. timeout_s: the longest
    wait for a completion.
    OSError, in one line, if the server does not reply, refuses a request, or replies something
    unexpected.
    """

    def __init__(
        self,
        url: str,
        model: str,
        stops: Sequence[int],
        context: float,
        *,
        timeout_s: float = 3600.0,
    ):
        self.url = url.rstrip("/")
        self.model = model
        self.stops = stops
        self.context = context
        self.timeout_s = timeout_s
        self.base = model  # its name on the server, after `check`
        self.engine = ""  # what the server calls itself, after `check`
        self.key = os.environ.get("OPENAI_API_KEY", "").strip()
        if not (self.key.isascii() and self.key.isprintable()):
            raise ValueError("OPENAI_API_KEY has characters that no header may have")

    def check(self) -> None:
        """Find the model's name on the server. If it serves a single base, we assume it is ours.

        OSError, with what it serves, if it has several bases and none of this path or id.
        """
        with self._json(self._ask("/models")) as reply:
            bases = {entry["id"]: entry for entry in reply["data"] if not entry.get("parent")}
        for name, entry in bases.items():
            if len(bases) == 1 or {name, entry.get("root")} & {self.model, whole_name(self.model)}:
                self.base = name
                self.engine = str(entry.get("owned_by", "unknown"))
                return
        raise self._error(f"serves {', '.join(bases) or 'nothing'}, not {self.model}")

    @contextlib.contextmanager
    def adapter(self, folder: str) -> Iterator[str]:
        """Load an adapter for the block, and yield its name, which the server has never had."""
        name = f"{Path(folder).name}-{uuid.uuid4().hex[:12]}"
        body = {"lora_name": name, "lora_path": str(Path(folder).resolve())}
        needs = "VLLM_ALLOW_RUNTIME_LORA_UPDATING=True, --enable-lora and --max-lora-rank"
        self._ask("/load_lora_adapter", body, hint=f"; vLLM needs {needs}")
        try:
            yield name
        finally:
            with contextlib.suppress(OSError):  # the server may be gone
                self._ask("/unload_lora_adapter", {"lora_name": name})

    def stream(
        self, jobs: Sequence[Any], sampling, rows: int, adapter: str = ""
    ) -> Iterator[list[Any]]:
        """Yield jobs as they are done, one at a time, with the sampled ids and the stop id.

        A job whose prompt fills the context gets no ids (S35).
        jobs: `rollout.Job`s, whose ids we fill in. sampling: a `rollout.Sampling`. rows:
        requests under way at a time. adapter: its name; "" is the base.
        We repeat a failed request after pauses. If it fails for good, we raise its error after the
        replies under way have been yielded.
        """
        errors: list[OSError] = []
        for job in jobs:
            job.begin(sampling, self.context)

        def complete(job):
            """In a thread: fill in a job, or leave it as it is after an error of any job."""
            try:
                if not job.done and not errors:
                    self._complete(job, sampling, adapter or self.base)
            except OSError as e:
                errors.append(e)
            return job

        # The pool's threads are daemons: an interrupted program does not wait for replies.
        with ThreadPool(max(1, min(rows, len(jobs)))) as pool:
            for job in pool.imap_unordered(complete, jobs):
                if job.done:
                    yield [job]
        if errors:
            raise errors[0]

    def _complete(self, job, sampling, model: str) -> None:
        """Fill in a job. The request sets every sampling field: a server's own have no effect."""
        body = {
            "model": model,
            "prompt": job.prompt,
            "max_tokens": job.limit,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k or -1,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "stop_token_ids": list(self.stops),
            "return_token_ids": True,
        }
        retries = Patience(
            7,
            backoff_factor=PAUSE_S,
            status_forcelist=[429, *range(500, 600)],
            allowed_methods=None,
            raise_on_status=False,
            respect_retry_after_header=False,
        )
        with self._json(self._ask("/completions", body, self.timeout_s, retries)) as reply:
            choice = reply["choices"][0]
            usage = reply.get("usage") or {}
            ids = choice.get("token_ids")
            reason = choice["finish_reason"]
            if ids is None:
                raise ValueError("no token_ids; take a server that returns them, such as vLLM")
            if usage.get("prompt_tokens", len(job.prompt)) != len(job.prompt):
                raise ValueError(f"it read {usage['prompt_tokens']} tokens of {len(job.prompt)}")
            is_whole = reason == "stop" or (reason == "length" and len(ids) == job.limit)
            are_ids = all(type(i) is int for i in ids)
            if not is_whole or len(ids) > job.limit or not are_ids:
                raise ValueError(f"{len(ids)} of {job.limit} token_ids, ended by {reason}")
            if reason == "stop" and (not ids or ids[-1] not in self.stops):
                ids = [*ids, *self.stops[:1]]  # some servers leave out the stop id
            job.ids = ids
            job.done = True

    @contextlib.contextmanager
    def _json(self, reply: requests.Response) -> Iterator[Any]:
        """Yield a reply's JSON. If the block cannot read something in it, we raise an OSError."""
        try:
            yield reply.json()
        except (ValueError, LookupError, TypeError, AttributeError) as e:
            cause = f"unexpected reply from the server ({type(e).__name__}: {e})"
            raise self._error(f"{cause}: {reply.text}") from None

    def _ask(
        self,
        path: str,
        body: dict | None = None,
        timeout_s: float = 300.0,
        retries: urllib3.Retry | int = 0,
        hint: str = "",
    ) -> requests.Response:
        """The reply to a request; OSError if there is none, or if its status is no success."""
        with requests.Session() as session:
            session.mount(self.url, requests.adapters.HTTPAdapter(max_retries=retries))
            try:
                reply = session.request(
                    "GET" if body is None else "POST",
                    self.url + path,
                    json=body,
                    headers={"Authorization": f"Bearer {self.key}"} if self.key else None,
                    auth=lambda request: request,  # else a login in ~/.netrc replaces the key
                    timeout=(30, timeout_s),  # to connect, to reply
                )
            except requests.RequestException as e:
                raise self._error(f"no reply at {path}: {e}") from None
        if not reply.ok:
            raise self._error(f"no success at {path}: HTTP {reply.status_code}: {reply.text}", hint)
        return reply

    def _error(self, what: str, hint: str = "") -> OSError:
        """An error in one line, in which the key is not shown."""
        hidden = what.replace(self.key, "***") if self.key else what
        return OSError(f"{self.url}: {textwrap.shorten(hidden, 300, placeholder=' ...')}{hint}")


class Patience(urllib3.Retry):
    """More tries after a 429, a 5xx, or a connection that was lost before a reply began."""

    def increment(self, *args: Any, **options: Any) -> Any:
        if isinstance(options.get("error"), urllib3.exceptions.ReadTimeoutError):
            raise options["error"]  # a server that is silent is not worth another wait
        return super().increment(*args, **options)


def whole_name(name: str) -> str:
    """A folder's absolute path, so that two names of one model are equal; a hub id as it is."""
    return str(Path(name).resolve()) if Path(name).exists() else name

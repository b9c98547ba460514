"""Sampling through OpenAI-compatible servers, with the interface of `rollout.stream`.

For a policy that does not change: an evaluation, a cold start, another model that writes the bank.
Prompts travel as token ids to /v1/completions, never as text: a server's chat template is not ours.
Sampled ids come back where the server has them (vLLM), else its text and its count of tokens. Such
samples are another sampler's than `generate`'s, and the two are never mixed silently (S27).
"""

import contextlib
import http.client
import json
import os
import queue
import re
import shlex
import sys
import threading
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from cli import UserError, brief
from policy import Ids, Model, Tokenizer, stop_ids
from rollout import Row, Sampling, Turn

PAUSES = (1, 2, 4, 8, 16, 32, 64)  # seconds between the tries of one request
QUESTION_S, LOAD_S = 60.0, 300.0  # the longest waits for a word, and for an adapter to be loaded


class Fault(Exception):
    """What may be over at the next try, such as a dropped connection."""

    def __init__(self, why: str, status: int = 0):
        super().__init__(why)
        self.status = status  # of the HTTP answer; 0 where there was none


def place(name: str) -> str:
    """A directory's whole path, so that two names of one model are equal; a hub id as it is."""
    return str(Path(name).resolve()) if Path(name).exists() else name


@dataclass
class Servers:
    """One model, with or without adapters, on servers that share the work."""

    urls: Sequence[str]
    base: str  # a directory or hub id
    rank: int = 0  # the largest of the adapters that will be asked for; 0 without any
    names: dict[str, str] = field(default_factory=dict)  # {`place` of a model: its name there}
    timeout_s: float = 3600.0  # the longest wait for a completion
    flag: str = "--server"
    engine: str = ""  # and its version, once `check` has asked
    unseeded: set[str] = field(default_factory=set)  # those whose requests carry no seeds
    base_names: dict[str, str] = field(default_factory=dict)  # {server: its name of the base}

    def __post_init__(self) -> None:
        for url in self.urls:
            with contextlib.suppress(ValueError):  # of its port or brackets
                if re.fullmatch(r"https?://.*/v1", url) and urlsplit(url).port != 0:
                    continue
            rule = "an address such as http://localhost:8000/v1 is wanted"
            raise UserError(f"{self.flag} {url}: {rule}")

    def stream(
        self,
        model: Model,
        tokenizer: Tokenizer,
        asked: Sequence[Row],
        sampling: Sampling,
        rows: int,
        adapter: str = "",
    ) -> Iterator[Turn]:
        """`rollout.stream` by the servers, of their model or with one of its adapters.

        model: an outline will do. `rows` requests are under way for each server that answers at the
        start, and has the adapter or loads it. What the pauses do not outlast ends in a
        ConnectionError, once the requests under way have ended.
        """
        if rows < 1 or not all(row.prompt for row in asked):
            raise ValueError(f"stream needs rows >= 1, got {rows}, and prompts that are not empty")
        if not asked:
            return
        tokens = max(len(row.prompt) + row.left for row in asked)
        with self._held(adapter) as name:
            urls = self._answering(tokens, name, adapter)
            job = _Job(self, urls, name, adapter, tokenizer, stop_ids(model, tokenizer), sampling)
            yield from job.turns(asked, rows)

    def check(self, tokens: int, adapters: Sequence[str] = ()) -> None:
        """UserError, with the command that would mend it, unless all servers are fit for the work.

        tokens: of the longest prompt and its completion. Each adapter is loaded, and unloaded.
        """
        for adapter in adapters or [""]:
            with self._held(adapter) as name:
                _, faults = self._look(tokens, name, adapter)
                for url, why in faults.items():
                    raise self._refusal(url, why, tokens)

    @contextlib.contextmanager
    def _held(self, adapter: str) -> Iterator[str]:
        """An adapter's name on the servers: a user's, or ours until the end; "" of none."""
        given = self.names.get(place(adapter)) if adapter else ""
        if given is not None:
            yield given
            return
        name = f"{Path(adapter).name}-{uuid.uuid4().hex[:8]}"  # no other evaluation's
        try:
            yield name
        finally:
            for url in self.urls:
                with contextlib.suppress(Fault, UserError):
                    _text(f"{url}/unload_lora_adapter", {"lora_name": name})

    def _answering(self, tokens: int, name: str, adapter: str) -> list[str]:
        """The servers that are fit now. ConnectionError where after all pauses none is."""
        for pause in (*PAUSES, 0):
            urls, faults = self._look(tokens, name, adapter)
            if urls:
                for url, why in faults.items():
                    print(f"{url}: {why}: the others go on without it", file=sys.stderr)
                return urls
            time.sleep(pause)
        raise ConnectionError("; ".join(f"{url}: {why}" for url, why in faults.items()))

    def _look(self, tokens: int, name: str, adapter: str) -> tuple[list[str], dict[str, str]]:
        """The servers that answer and have the adapter, all of one engine; why others do not."""
        engines, faults = {}, {}
        for url in self.urls:
            why = "no server answers"
            try:
                engine = self._look_at(url, tokens)
                why = f"does not load {adapter}"
                self.load(url, name, adapter)
                engines[url] = engine
            except Fault as e:
                faults[url] = f"{why} ({e})"
        if len(set(engines.values())) > 1:
            each = ", ".join(f"{url} is {engine}" for url, engine in engines.items())
            raise UserError(f"{self.flag}: {each}; give servers of one engine and version")
        self.engine = next(iter(engines.values()), self.engine)
        return list(engines), faults

    def _look_at(self, url: str, tokens: int) -> str:
        """A server's engine and version. UserError unless it has the model and enough context."""
        listed = self._listed(url)
        wanted = place(self.base)
        given = self.names.get(wanted)
        for name, entry in listed.items():
            if (given or wanted) in (name, place(name), place(str(entry.get("root")))):
                break
        else:
            why = f"serves {', '.join(listed) or 'nothing'}, not {given or self.base}"
            raise self._refusal(url, why, tokens)
        context = entry.get("max_model_len") or tokens  # some servers do not tell
        if context < tokens:
            why = f"a context of {context} tokens is too short for prompt and reply, {tokens}"
            raise self._refusal(url, f"{why}; ask for shorter replies", tokens)
        self.base_names[url] = name
        version, beside = "of unknown version", url.removesuffix("/v1")
        try:
            version = json.loads(_text(f"{beside}/version"))["version"]
        except Fault as e:
            if e.status != 404:  # such a server tells no version
                raise
        except (UserError, ValueError, KeyError, TypeError):
            pass
        with contextlib.suppress(Fault, UserError):
            if _on_cpu(_text(f"{beside}/metrics")):
                self.stop_seeding(url, "vLLM on CPU, whose engine may die of a seed")
        return f"{entry.get('owned_by', 'an unknown engine')} {version}"

    def _listed(self, url: str) -> dict[str, dict]:
        """What a server says of its models, by the names that it has for them."""
        try:
            return {entry["id"]: entry for entry in json.loads(_text(f"{url}/models"))["data"]}
        except UserError as e:
            raise UserError(f"{self.flag} {url}: {e}") from None
        except (ValueError, KeyError, TypeError) as e:
            raise UserError(f"{self.flag} {url}: no list of models ({brief(e)})") from None

    def _refusal(self, url: str, why: str, tokens: int) -> UserError:
        """One line that ends in what starts a server for all that will be asked for."""
        port = urlsplit(url).port or 80
        command = f"vllm serve {shlex.quote(self.base)} --port {port} --max-model-len {tokens}"
        given = self.names.get(place(self.base))
        if given:
            command += f" --served-model-name {shlex.quote(given)}"
        if self.rank:
            rank = max(8, 1 << (self.rank - 1).bit_length())  # a power of two: vLLM takes no other
            command = f"VLLM_ALLOW_RUNTIME_LORA_UPDATING=True {command} --enable-lora"
            command += f" --max-lora-rank {rank}"
        return UserError(f"{self.flag} {url}: {why}; start one with: {command}")

    def load(self, url: str, name: str, adapter: str) -> None:
        """Have a server load an adapter under this name, unless it has it. Fault if it does not."""
        listed = self._listed(url) if name else {}
        if not name or name in listed or name.partition(":")[0] in listed:  # SGLang's base:name
            return
        if name in self.names.values():
            why = f"{url} serves {', '.join(listed)}; load it there, or leave the name out"
            raise UserError(f"--served {name}={adapter}: {why}")
        body = {"lora_name": name, "lora_path": place(adapter)}
        try:
            _text(f"{url}/load_lora_adapter", body, LOAD_S)
        except UserError as e:
            raise Fault(str(e)) from None

    def stop_seeding(self, url: str, why: str) -> None:
        if url not in self.unseeded:
            self.unseeded.add(url)
            print(f"{url}: {why}: requests carry no seeds from here on", file=sys.stderr)


@dataclass
class _Job:
    """Rows on their way through the servers, each in a thread that waits for its answer."""

    servers: Servers
    urls: Sequence[str]  # of those that answered at the start
    name: str  # of the adapter on the servers; "" is their base model
    adapter: str
    tokenizer: Tokenizer
    stops: Ids
    sampling: Sampling
    waiting: queue.SimpleQueue = field(default_factory=queue.SimpleQueue)  # rows
    finished: queue.SimpleQueue = field(default_factory=queue.SimpleQueue)  # see `turns`
    failed: set[str] = field(default_factory=set)  # servers whose first failure was said
    ending: threading.Event = field(default_factory=threading.Event)
    loading: threading.Lock = field(default_factory=threading.Lock)

    def turns(self, asked: Sequence[Row], rows: int) -> Iterator[Turn]:
        """Rows as they finish; after the first error those under way, and then the error.

        A thread puts each of its rows that is complete into `finished`, or what went wrong, and in
        the end a None.
        """
        for row in asked:
            self.waiting.put(row)
        urls = [*self.urls] * rows
        running = min(len(urls), len(asked))
        for url in urls[:running]:  # daemons: an interrupted program does not wait for them
            threading.Thread(target=self._work, args=(url,), daemon=True).start()
        error: Exception | None = None
        try:
            while running:
                result = self.finished.get()
                if isinstance(result, Row):
                    yield [(result.index, result.ids)]
                elif result is None:
                    running -= 1
                else:
                    error = error or result
        finally:
            self.ending.set()
        if error:
            raise error

    def _work(self, url: str) -> None:
        """Complete rows as long as there are any, at this server first."""
        try:
            while not self.ending.is_set():
                row = self.waiting.get_nowait()
                self._complete(row, url)
                self.finished.put(row)
        except queue.Empty:
            pass
        except Exception as e:  # of any kind: the main thread waits for a word of this one
            self.finished.put(e)  # before a row that waits for its next try gives up, too
            self.ending.set()
        self.finished.put(None)

    def _complete(self, row: Row, url: str) -> None:
        """Fill a row in, with a limited number of tries, which go from server to server."""
        servers, first = self.servers, self.urls.index(url)
        for tries, pause in enumerate((*PAUSES, 0), 1):
            body = self._body(row, url)
            try:
                self._fill(row, _text(f"{url}/completions", body, servers.timeout_s))
                return
            except UserError as e:
                prompt = f"a prompt of {len(row.prompt)} tokens"
                raise UserError(f"{servers.flag} {url}: no completion of {prompt}: {e}") from None
            except Fault as e:
                if url not in self.failed:
                    self.failed.add(url)
                    print(f"{url}: {e}: trying again", file=sys.stderr)
                if "seed" in body and e.status == 500:
                    servers.stop_seeding(url, f"a request with a seed failed ({e})")
                if not pause or self.ending.wait(pause):
                    raise ConnectionError(f"{url}: failed {tries} times ({e})") from None
                if e.status == 404:  # a server that was started anew has no adapters
                    with self.loading, contextlib.suppress(Fault, UserError):
                        servers.load(url, self.name, self.adapter)
            url = self.urls[(first + tries) % len(self.urls)]

    def _body(self, row: Row, url: str) -> dict[str, Any]:
        """A request with every field of sampling, so that a server's own settings have no say."""
        body: dict[str, Any] = {"model": self.name or self.servers.base_names[url]}
        body |= {"prompt": row.prompt, "max_tokens": row.left, "stop_token_ids": self.stops}
        body |= {"temperature": self.sampling.temperature, "top_p": self.sampling.top_p}
        body |= {"top_k": self.sampling.top_k or -1, "min_p": 0.0, "repetition_penalty": 1.0}
        body |= {"presence_penalty": 0.0, "frequency_penalty": 0.0}
        body |= {"skip_special_tokens": False, "return_token_ids": True}
        return body if url in self.servers.unseeded else body | {"seed": row.key >> 1}  # 63 bits

    def _fill(self, row: Row, text: str) -> None:
        """Put an answer into its row. Fault where it was broken off, UserError where it is none."""
        try:
            answer = json.loads(text)
            choice = answer["choices"][0]
            reason, ids, counted = choice["finish_reason"], choice.get("token_ids"), 0
            if ids is None:
                ids = self.tokenizer.encode(choice["text"], add_special_tokens=False)
                counted = int(answer["usage"]["completion_tokens"])
            elif len(ids) > row.left or not all(type(i) is int and i >= 0 for i in ids):
                raise ValueError(f"token_ids must be at most {row.left} ids")
        except (ValueError, LookupError, TypeError, AttributeError) as e:
            raise UserError(f"nonsense ({brief(e)}): {text[:200]}") from None
        if reason not in ("stop", "length"):
            raise Fault(f"a completion ended for the reason {reason!r}")
        made = counted or len(ids)
        if reason == "length" and made < row.left:  # else it would count as cut at our own limit
            raise UserError(
                f"cut after {made} of {row.left} tokens, by a limit of the server's own"
            )
        if reason == "stop" and not {*ids[-1:]} & {*self.stops}:
            ids = ids + self.stops[:1]  # which some leave out
        row.ids, row.counted, row.left = ids, counted, 0


def _on_cpu(metrics: str) -> bool:
    """Whether vLLM's settings of its cache are those that it takes on CPU alone, by default."""
    settings = "".join(re.findall(r"vllm:cache_config_info\{.*\}", metrics))
    return 'block_size="128"' in settings and 'kv_cache_memory_bytes="None"' not in settings


def _text(url: str, body: dict | None = None, timeout_s: float = QUESTION_S) -> str:
    """A server's answer. Fault where another try may help, UserError where the server refuses."""
    data = None if body is None else json.dumps(body).encode()
    headers = {"Content-Type": "application/json"}
    key = os.environ.get("OPENAI_API_KEY", "").strip()
    if not (key.isascii() and key.isprintable()):
        raise UserError("OPENAI_API_KEY has characters that no header may have")
    if key:
        headers["Authorization"] = f"Bearer {key}"
    request = urllib.request.Request(url, data, headers)
    try:
        try:
            reply = urllib.request.urlopen(request, timeout=timeout_s)
        except urllib.error.HTTPError as e:
            reply = e
        with reply:
            text, status = reply.read().decode("utf-8", "replace"), reply.status
    except TimeoutError:
        raise Fault(f"no answer within {timeout_s:g} seconds") from None
    except (OSError, http.client.HTTPException, UnicodeError) as e:  # refused, dropped, no host
        raise Fault(brief(getattr(e, "reason", e))) from None
    if status == 200:
        return text
    why = f"HTTP {status}: {' '.join(text.split())[:300]}"
    if status >= 500 or status in (404, 429):  # 404: a server started anew, without its adapters
        raise Fault(why, status)
    raise UserError(why)

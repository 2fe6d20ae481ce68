"""Answers from an OpenAI-compatible server (vLLM, SGLang) that serves the target, many rows at a time, in order."""

from __future__ import annotations

import json
import queue
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import msgspec

from producer.answer_lines import AnswerFile, GenerateReport, answer_line
from producer.chat import Conversation, Message
from producer.chat_server import Refused, Server
from producer.config import DataConfig
from producer.decoding import Decoding, row_seed
from producer.dialogue import Dialogue
from producer.provenance import begin_output, provenance_of
from producer.questions import open_dialogues
from producer.rows import Skips
from producer.samples import SampleMaker
from protocol.errors import RequestError

# Rows that are under way or wait behind a slow one, for each request at a time.
AHEAD = 4
# So many refusals without an answer between them are no matter of single rows.
MOST_REFUSED = 10


class Served(msgspec.Struct, frozen=True):
    """How a dialogue ended at the server: the last finish reason, or why it refused; prompt tokens that it counted for
    the first question; ids of the last prompt and answer where they were asked for."""

    finish_reason: str
    refused: str = ""
    first_prompt_tokens: int | None = None
    tokens: tuple[list[int], list[int]] | None = None


def served_answers(
    data: DataConfig,
    maker: SampleMaker,
    server: Server,
    model: str,
    out: Path,
    decoding: Decoding,
    concurrency: int,
    say: Callable[[str], None] | None = None,
) -> GenerateReport:
    """As `producer.generate.generate_answers`, with `concurrency` requests at a time to `server`.

    A row that the server refuses stands in the output with its `error` and without messages, so that the next start
    does not ask again; `prepare` skips and counts it. Raises RequestError and RunError as the server's answers demand.
    """
    made_by = {"model": model, "served_model": model, "server": server.url}
    resumed = begin_output(out, provenance_of(data, maker, decoding, made_by))
    skips = Skips(data.strict)
    counts = {"rows": 0, "answered": 0, "unfinished": 0, "refused": 0, "other_prompts": 0}
    ask = _workers(lambda dialogue: _converse(dialogue, server, model, decoding), concurrency)
    pending: deque[tuple[Dialogue, int, Future[Served]]] = deque()
    held: list[dict[str, Any]] = []

    with AnswerFile(out, resumed, say) as lines:

        def write_first() -> None:
            dialogue, prompt_tokens, future = pending.popleft()
            served = future.result()
            line = _line(dialogue, served, decoding, maker)
            held.append(line)
            if served.refused:
                counts["refused"] += 1
                if len(held) >= MOST_REFUSED:
                    raise RequestError(f"--server: the last {len(held)} rows were refused: {served.refused}")
                return
            counts["answered"] += 1
            counts["unfinished"] += served.finish_reason == "length"
            counts["other_prompts"] += served.first_prompt_tokens not in (None, prompt_tokens)
            _write(lines, held)

        for dialogue, prompt in open_dialogues(data, maker, decoding, skips, resumed, counts):
            if dialogue.item.conversation is None:
                raise RequestError(f"{dialogue.item.row.place}: rows of token ids cannot be asked of a chat server")
            pending.append((dialogue, len(prompt), ask(dialogue)))
            while pending and (len(pending) >= AHEAD * concurrency or pending[0][2].done()):
                write_first()
        while pending:
            write_first()
        _write(lines, held)
    return GenerateReport(resumed=resumed, skipped=skips.counts, **counts)


def _write(lines: AnswerFile, held: list[dict[str, Any]]) -> None:
    for line in held:
        lines.write(line)
    held.clear()


def _workers(work: Callable[[Dialogue], Served], count: int) -> Callable[[Dialogue], Future[Served]]:
    """A function that hands a dialogue to one of `count` threads. They end with the process, also in mid-request."""
    waiting: queue.SimpleQueue[tuple[Dialogue, Future[Served]]] = queue.SimpleQueue()

    def serve() -> None:
        while True:
            dialogue, future = waiting.get()
            try:
                future.set_result(work(dialogue))
            except BaseException as error:  # passed on to who waits for it
                future.set_exception(error)

    for number in range(count):
        threading.Thread(target=serve, name=f"ask-{number}", daemon=True).start()

    def ask(dialogue: Dialogue) -> Future[Served]:
        future: Future[Served] = Future()
        waiting.put((dialogue, future))
        return future

    return ask


def _converse(dialogue: Dialogue, server: Server, model: str, decoding: Decoding) -> Served:
    """All turns of a dialogue, one after the other."""
    first: int | None = None
    reason, tokens = "stop", None
    while dialogue.open:
        seed = row_seed(decoding.sampling, dialogue.number, dialogue.answers)
        body = request_body(dialogue.question, model, decoding, seed)
        try:
            answer = server.complete(body)
        except Refused as refused:
            if not dialogue.answers:
                return Served("error", str(refused))
            dialogue.end()  # a later prompt has become too long, say
            break
        choice = answer["choices"][0]
        if first is None:
            first = (answer.get("usage") or {}).get("prompt_tokens")
        reason = str(choice.get("finish_reason") or "stop")
        if decoding.with_tokens:
            tokens = _token_ids(answer, choice)
        dialogue.take(_spoken(choice["message"]), reason == "length")
    return Served(reason, "", first, tokens)


def request_body(question: Conversation, model: str, decoding: Decoding, seed: int) -> dict[str, Any]:
    """The chat completion that asks for the next answer. `top_k`, `chat_template_kwargs` and `return_token_ids` are
    extensions that vLLM and SGLang have; they are left out where they are not needed."""
    sampling = decoding.sampling
    body: dict[str, Any] = {
        "model": model,
        "messages": [_for_server(message) for message in question.messages],
        "max_tokens": decoding.max_new_tokens,
        "temperature": sampling.temperature,
    }
    if question.tools:
        body["tools"] = list(question.tools)
    if sampling.temperature:
        body |= {"top_p": sampling.top_p, "seed": seed} | ({"top_k": sampling.top_k} if sampling.top_k else {})
    if decoding.thinking is not None:
        on = decoding.thinking == "on"
        body["chat_template_kwargs"] = {"enable_thinking": on, "thinking": on}
    if decoding.with_tokens:
        body["return_token_ids"] = True
    return body


def _for_server(message: Message) -> Message:
    calls = message.get("tool_calls")
    if not calls:
        return message
    written = [
        {
            "id": call.get("id", f"call_{place}"),
            "type": "function",
            "function": {
                **call["function"],
                "arguments": json.dumps(call["function"]["arguments"], ensure_ascii=False),
            },
        }
        for place, call in enumerate(calls)
    ]
    return {**message, "tool_calls": written}


def _spoken(message: dict[str, Any]) -> Message:
    said: Message = {"role": "assistant", "content": message.get("content") or ""}
    reasoning = message.get("reasoning_content") or message.get("reasoning")
    if isinstance(reasoning, str) and reasoning:
        said["reasoning_content"] = reasoning
    if message.get("tool_calls"):
        said["tool_calls"] = message["tool_calls"]
    return said


def _token_ids(answer: dict[str, Any], choice: dict[str, Any]) -> tuple[list[int], list[int]]:
    prompt = answer.get("prompt_token_ids") or choice.get("prompt_token_ids")
    said = choice.get("token_ids")
    if not isinstance(prompt, list) or not isinstance(said, list):
        raise RequestError("--tokens: the server returns no token ids (vLLM from 0.10.2 on does): leave --tokens out")
    return prompt, said


def _line(dialogue: Dialogue, served: Served, decoding: Decoding, maker: SampleMaker) -> dict[str, Any]:
    line = answer_line(dialogue, served.finish_reason, decoding, served.tokens, maker.tokenizer_id)
    if not served.refused:
        return line
    return {"error": served.refused} | {key: line[key] for key in ("finish_reason", "source", "sampling")}

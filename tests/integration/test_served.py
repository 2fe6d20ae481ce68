"""Answers from a chat server over real sockets: order, retries, refusals, resuming, and that `prepare` takes them."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from producer import chat_server
from producer.answer_lines import GenerateReport
from producer.chat_server import Server
from producer.config import DataConfig, SourceConfig
from producer.decoding import Decoding, Sampling
from producer.prepare import prepare, report_of
from producer.samples import SampleMaker
from producer.served import served_answers
from producer.template import load_tokenizer
from protocol.errors import RequestError, RunError

Answer = Callable[[dict[str, Any], int], tuple[int, bytes]]


def said(text: str, reason: str = "stop", **more: Any) -> tuple[int, bytes]:
    choice = {"message": {"role": "assistant", "content": text}, "finish_reason": reason, **more.pop("choice", {})}
    return 200, json.dumps({"choices": [choice], **more}).encode()


def echo(body: dict[str, Any], _: int) -> tuple[int, bytes]:
    return said("re " + body["messages"][-1]["content"])


class Fake:
    """A server whose `answer(body, n)` tells what the n-th request gets; `bodies` are those that came."""

    def __init__(self) -> None:
        self.answer: Answer = echo
        self.bodies: list[dict[str, Any]] = []
        self.keys: list[str] = []
        self.lock = threading.Lock()
        fake = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with fake.lock:
                    fake.bodies.append(body)
                    fake.keys.append(self.headers.get("Authorization", ""))
                    count = len(fake.bodies)
                code, answer = fake.answer(body, count)
                if code == 0:
                    self.connection.close()
                    return
                self.send_response(code)
                self.send_header("Content-Length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            def do_GET(self) -> None:
                answer = json.dumps({"data": [{"id": "tiny"}]}).encode()
                self.send_response(200)
                self.send_header("Content-Length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            def log_message(self, *_: Any) -> None:
                pass

            def handle(self) -> None:
                with suppress(OSError, ValueError):  # a client that gave up
                    super().handle()

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.http.server_address[1]}/v1"
        threading.Thread(target=self.http.serve_forever, daemon=True).start()


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[Fake]:
    monkeypatch.setattr(chat_server, "FIRST_PAUSE_S", 0.01)
    found = Fake()
    yield found
    found.http.shutdown()
    found.http.server_close()


@pytest.fixture
def folder(make_folder: Callable[..., Path]) -> Path:
    return make_folder("qwen3")


@pytest.fixture
def job(tmp_path: Path, fake: Fake, folder: Path) -> Callable[..., GenerateReport]:
    source = tmp_path / "in.jsonl"
    if not source.exists():
        turns = [
            [{"role": "user", "content": f"hello {row}"}, {"role": "assistant", "content": "old"}] for row in range(9)
        ]
        source.write_text("".join(json.dumps({"messages": each}) + "\n" for each in turns) + "not json\n")
    maker = SampleMaker(load_tokenizer(folder), 400, 200)

    def run(retries: int = 3, timeout_s: float = 20, concurrency: int = 3, **decoding: Any) -> GenerateReport:
        server = Server(url=fake.url, key="secret", retries=retries, timeout_s=timeout_s)
        data = DataConfig(train=[SourceConfig(path=str(source))])
        return served_answers(data, maker, server, "tiny", tmp_path / "out.jsonl", Decoding(**decoding), concurrency)

    return run


def lines(tmp_path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]


def test_rows_are_answered_in_order_however_slow_each_is(
    tmp_path: Path, fake: Fake, folder: Path, job: Callable[..., GenerateReport]
) -> None:
    def answer(body: dict[str, Any], count: int) -> tuple[int, bytes]:
        time.sleep(0.1 if count % 3 == 1 else 0)
        return echo(body, count)

    fake.answer = answer
    report = job()
    assert (report.rows, report.answered, report.skipped) == (10, 9, {"not JSON": 1})
    found = lines(tmp_path)
    assert [line["messages"][-1]["content"] for line in found] == [f"re hello {row}" for row in range(9)]
    assert found[0]["finish_reason"] == "stop"
    assert found[0]["sampling"] == {"max_new_tokens": 256, "temperature": 0.0}
    assert set(fake.keys) == {"Bearer secret"}
    assert "secret" not in (tmp_path / "out.jsonl.provenance.json").read_text()
    data = DataConfig(train=[SourceConfig(path=str(tmp_path / "out.jsonl"))])
    dataset = prepare(data, load_tokenizer(folder), {"vocab_size": 400, "eos_token_id": 3}, tmp_path / "d")
    assert report_of(dataset).kept == 9


TROUBLE: dict[str, tuple[int, bytes]] = {
    "busy": (429, b"{}"),
    "broken": (500, b"oops"),
    "garbled": (200, b'{"choices": ['),
    "empty": (200, b'{"choices": []}'),
    "another thing": (200, b"[1]"),
    "cut off": (0, b""),
}


@pytest.mark.parametrize("kind", TROUBLE)
def test_a_troubled_server_is_asked_again(
    tmp_path: Path, fake: Fake, job: Callable[..., GenerateReport], kind: str
) -> None:
    fake.answer = lambda body, count: TROUBLE[kind] if count in (1, 3, 4) else echo(body, count)
    assert job().answered == 9
    assert len(fake.bodies) == 12
    assert len(lines(tmp_path)) == 9


def test_a_slow_answer_is_given_up_and_asked_for_again(fake: Fake, job: Callable[..., GenerateReport]) -> None:
    def answer(body: dict[str, Any], count: int) -> tuple[int, bytes]:
        time.sleep(1.5 if count == 2 else 0)
        return echo(body, count)

    fake.answer = answer
    assert job(timeout_s=0.5).answered == 9
    assert len(fake.bodies) == 10


def test_a_server_that_stays_away_fails_the_command_and_the_next_start_goes_on(
    tmp_path: Path, fake: Fake, job: Callable[..., GenerateReport]
) -> None:
    fake.answer = lambda body, count: echo(body, count) if count <= 4 else (503, b'{"error": {"message": "loading"}}')
    with pytest.raises(RunError, match="503: loading; tried 2 times"):
        job(retries=1, concurrency=1)
    done = lines(tmp_path)
    assert 1 <= len(done) <= 4
    with (tmp_path / "out.jsonl").open("a") as file:
        file.write('{"messages": [{"ro')  # torn
    fake.answer, fake.bodies[:] = echo, []
    report = job()
    assert (report.resumed, report.answered) == (len(done), 9 - len(done))
    # What is there is not asked again; a busy machine may ask twice for what is not.
    assert {body["messages"][-1]["content"] for body in fake.bodies} == {f"hello {row}" for row in range(len(done), 9)}
    assert [line["messages"][-1]["content"] for line in lines(tmp_path)] == [f"re hello {row}" for row in range(9)]


def test_a_row_that_is_refused_is_noted_and_not_asked_again(
    tmp_path: Path, fake: Fake, folder: Path, job: Callable[..., GenerateReport]
) -> None:
    def answer(body: dict[str, Any], count: int) -> tuple[int, bytes]:
        bad = body["messages"][-1]["content"] == "hello 4"
        return (400, b'{"error": {"message": "too long"}}') if bad else echo(body, count)

    fake.answer = answer
    report = job()
    assert (report.answered, report.refused) == (8, 1)
    line = lines(tmp_path)[4]
    assert (line["error"], line["finish_reason"], "messages" in line) == ("400: too long", "error", False)
    fake.bodies.clear()
    assert job().resumed == 9
    assert fake.bodies == []
    data = DataConfig(train=[SourceConfig(path=str(tmp_path / "out.jsonl"))])
    dataset = prepare(data, load_tokenizer(folder), {"vocab_size": 400, "eos_token_id": 3}, tmp_path / "d")
    assert report_of(dataset).kept == 8


@pytest.mark.parametrize("code", [401, 403, 404])
def test_what_fails_for_every_row_is_a_wrong_request(
    tmp_path: Path, fake: Fake, job: Callable[..., GenerateReport], code: int
) -> None:
    fake.answer = lambda body, count: (code, b'{"message": "no such model"}')
    with pytest.raises(RequestError, match=f"{code}: no such model"):
        job()
    assert lines(tmp_path) == []


def test_settings_reach_the_server(fake: Fake, job: Callable[..., GenerateReport]) -> None:
    sampling = Sampling(temperature=0.7, top_p=0.9, top_k=20, seed=5)
    job(sampling=sampling, thinking="off", max_new_tokens=7)
    body = fake.bodies[0]
    assert (body["model"], body["max_tokens"], body["temperature"]) == ("tiny", 7, 0.7)
    assert (body["top_p"], body["top_k"]) == (0.9, 20)
    assert body["chat_template_kwargs"] == {"enable_thinking": False, "thinking": False}
    assert len({each["seed"] for each in fake.bodies}) == 9


def test_each_turn_is_answered_on_top_of_the_new_ones(
    tmp_path: Path, fake: Fake, job: Callable[..., GenerateReport]
) -> None:
    roles = ["user", "assistant", "user", "assistant"]
    row = {"messages": [{"role": role, "content": f"{role} {at}"} for at, role in enumerate(roles)]}
    (tmp_path / "in.jsonl").write_text(json.dumps(row) + "\n")
    job(turns="each")
    (line,) = lines(tmp_path)
    assert [message["content"] for message in line["messages"]] == ["user 0", "re user 0", "user 2", "re user 2"]
    assert [len(body["messages"]) for body in fake.bodies] == [1, 3]
    assert fake.bodies[1]["messages"][1]["content"] == "re user 0"


def test_token_ids_are_kept_where_the_server_gives_them(
    tmp_path: Path, fake: Fake, job: Callable[..., GenerateReport]
) -> None:
    fake.answer = lambda body, count: said("x", prompt_token_ids=[5, 6], choice={"token_ids": [7, 3]})
    job(with_tokens=True)
    assert (lines(tmp_path)[0]["input_ids"], lines(tmp_path)[0]["loss_mask"]) == ([5, 6, 7, 3], [0, 0, 1, 1])
    (tmp_path / "out.jsonl").unlink()
    fake.answer = echo
    with pytest.raises(RequestError, match="returns no token ids"):
        job(with_tokens=True)


def test_another_template_at_the_server_shows(fake: Fake, job: Callable[..., GenerateReport]) -> None:
    fake.answer = lambda body, count: said("x", "length", usage={"prompt_tokens": 1})
    report = job()
    assert (report.other_prompts, report.unfinished) == (9, 9)


def test_the_only_model_is_found_and_an_absent_server_named(fake: Fake) -> None:
    assert Server(url=fake.url).only_model() == "tiny"
    with pytest.raises(RunError, match="tried 1 times"):
        Server(url="http://127.0.0.1:9/v1", retries=0).only_model()
    with pytest.raises(RequestError, match="write http://HOST:PORT/v1"):
        Server(url="localhost", retries=0).only_model()

"""The configuration: every mistake is refused by file, line and key; what is resolved survives its JSON."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from launch.config import Config, load_config
from protocol.errors import RequestError

MINIMAL = """\
[target]
model = "embedded"
[data]
train = [{ path = "chats.jsonl" }]
"""
EVERYTHING = """\
[run]
name = "first"
dir = "somewhere"
hang_after = "10min"
[target]
model = "org/model"
revision = "abc"
dtype = "bfloat16"
attn = "eager"
compile = true
tensor_parallel = 2
trust_remote_code = true
[data]
train = [{ path = "a.jsonl", format = "sharegpt", thinking = "off" }, { path = "b.jsonl" }]
eval = [{ path = "c.jsonl" }]
max_length = 512
max_samples = 100
strict = true
[drafter]
preset = "qwen3-8b"
taps = [1, 5]
layers = 2
block_size = 8
heads = 4
kv_heads = 2
head_dim = 16
mlp = 64
rope_theta = 1e6
mask_token = 17
layer_types = ["sliding_attention", "full_attention"]
sliding_window = 32
init_from = "published"
init_optimiser = true
[train]
epochs = 3
max_steps = 1000
max_hours = 8.5
batch_tokens = 4096
microbatch_tokens = 1024
microbatch_draft_tokens = 2048
anchors = 64
lr = 1e-3
warmup = 0.1
schedule = "wsd"
gamma = 5.0
weight_decay = 0.0
grad_clip = 0.5
precision = "fp32"
checkpoint_every = 50
keep_checkpoints = 2
quarantine_limit = 0.5
skip_limit = 0.2
seed = 9
[ring]
bytes = "64MiB"
transport = "zmq"
[gpus]
split = "3:1"
producers = [0, 1]
consumers = [2]
[hosts]
listen = "tcp://10.0.0.1:5757"
curve = false
producers = 3
[eval]
every = 100
prompts = 8
max_new_tokens = 64
[log]
tensorboard = true
wandb = "project"
[cache]
mode = "only"
dir = "features"
max_bytes = "10GB"
dtype = "fp8"
"""


@pytest.fixture
def written(tmp_path: Path) -> Callable[[str], Path]:
    def write(text: str) -> Path:
        path = tmp_path / "exp.toml"
        path.write_text(text)
        return path

    return write


def refusal(path: Path, *overrides: str) -> str:
    with pytest.raises(RequestError) as refused:
        load_config(path, overrides)
    said = str(refused.value)
    assert "\n" not in said
    return said


def test_a_minimal_config_is_named_after_its_file(written: Callable[[str], Path]) -> None:
    config = load_config(written(MINIMAL))
    assert config.run.name == "exp"
    assert config.target.model == "embedded"
    assert (config.train.lr, config.train.anchors, config.ring.bytes, config.gpus.split) == (6e-4, 512, "auto", "auto")


def test_every_key_survives_the_resolved_json(written: Callable[[str], Path]) -> None:
    config = load_config(written(EVERYTHING))
    defaults = load_config(written(MINIMAL))
    for section in msgspec.structs.fields(Config):
        for field in msgspec.structs.fields(section.type):
            # The only other value of train.loss excludes train.gamma; drafter.init and init_from exclude each other.
            if f"{section.name}.{field.name}" not in ("drafter.kind", "drafter.init", "train.loss"):
                mine, other = (getattr(getattr(each, section.name), field.name) for each in (config, defaults))
                assert mine != other, f"EVERYTHING leaves {section.name}.{field.name} at its default"
    resolved = json.dumps(msgspec.to_builtins(config), indent=2)
    assert msgspec.json.decode(resolved, type=Config) == config


# --- refusals --------------------------------------------------------------------------------------------------------


def test_a_missing_file(tmp_path: Path) -> None:
    assert refusal(tmp_path / "nothing.toml") == f"{tmp_path}/nothing.toml: no such file"


def test_a_folder_or_a_binary_file_is_refused_by_name(tmp_path: Path) -> None:
    assert refusal(tmp_path).startswith(f"{tmp_path}: ")
    (tmp_path / "x.toml").write_bytes(b"\xff\xfe")
    assert refusal(tmp_path / "x.toml").startswith(f"{tmp_path}/x.toml: ")


def test_what_is_not_toml_names_the_line(written: Callable[[str], Path]) -> None:
    path = written(MINIMAL + "[train]\nlr = = 3\n")
    said = refusal(path)
    assert said.startswith(f"{path}: ")
    assert "line 6" in said


@pytest.mark.parametrize(
    ("text", "line", "key", "near"),
    [
        ("[trian]\nlr = 1e-3\n", 5, "trian", "did you mean 'train'?"),
        ("[train]\nlr = 1e-3\nwarm_up = 0.1\n", 7, "train.warm_up", "did you mean 'warmup'?"),
        ("[drafter]\nblock_sise = 8\n", 6, "drafter.block_sise", "did you mean 'block_size'?"),
        ("[ring]\nslots = 8\n", 6, "ring.slots", "known here: bytes, transport"),
        ("[gpus]\nconsumer = [1]\n", 6, "gpus.consumer", "did you mean 'consumers'?"),
    ],
)
def test_an_unknown_key_names_line_path_and_the_nearest(
    written: Callable[[str], Path], text: str, line: int, key: str, near: str
) -> None:
    path = written(MINIMAL + text)
    assert refusal(path) == f"{path}:{line}: unknown key {key!r}; {near}"


@pytest.mark.parametrize(
    ("text", "line", "key", "reason"),
    [
        ('[train]\nlr = "high"\n', 6, "train.lr", "Expected `float`, got `str`"),
        ("[train]\nepochs = 1.5\n", 6, "train.epochs", "Expected `int`, got `float`"),
        ("[train]\n\n# the rate\nepochs = true\n", 8, "train.epochs", "Expected `int`, got `bool`"),
        (
            '[train]\nschedule = "linear"\n',
            6,
            "train.schedule",
            "Invalid enum value 'linear': write one of cosine, wsd",
        ),
        ('[ring]\ntransport = "tcp"\n', 6, "ring.transport", "Invalid enum value 'tcp': write one of auto, shm, zmq"),
        ('[[data.eval]]\npath = "a"\nthinking = "on"\n', 7, "data.eval[0].thinking", "write one of keep, off"),
        ("[train]\nschedule = 3\n", 6, "train.schedule", "got `int`: write one of cosine, wsd"),
        ('[drafter]\ntaps = "all"\n', 6, "drafter.taps", "value 'all': write auto or a list of whole numbers"),
        ('[drafter]\ntaps = ["all"]\n', 6, "drafter.taps[0]", "Expected `int`, got `str`"),
        ("[train]\ngamma = true\n", 6, "train.gamma", "got `bool`: write auto or a number"),
        ('[train]\nmicrobatch_tokens = "all"\n', 6, "train.microbatch_tokens", "'all': write auto or a whole number"),
    ],
)
def test_a_wrong_type_names_line_and_key(
    written: Callable[[str], Path], text: str, line: int, key: str, reason: str
) -> None:
    path = written(MINIMAL + text)
    said = refusal(path)
    assert said.startswith(f"{path}:{line}: {key}: ")
    assert reason in said


@pytest.mark.parametrize(
    ("word", "problem"), [("yes", "Invalid enum value 'yes'"), (3, "Expected `bool | str`, got `int`")]
)
def test_a_key_of_several_types_names_its_words(written: Callable[[str], Path], word: str | int, problem: str) -> None:
    path = written(MINIMAL)
    said = f"{path}: target.compile: {problem}: write one of auto, true, false"
    assert refusal(path, f"target.compile={word}") == said


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('[gpus]\nproducers = [0, "1"]\n', "6: gpus.producers[1]: Expected `int`, got `str`"),
        ('[gpus]\nproducers = [\n  0, # one\n  "1",\n]\n', "8: gpus.producers[1]: Expected `int`, got `str`"),
        ('[[data.eval]]\npath = "a"\n[[data.eval]]\npath = 5\n', "8: data.eval[1].path: Expected `str`, got `int`"),
        ('[[data.eval]]\nformat = "auto"\n', "5: data.eval[0]: Object missing required field `path`"),
        ('[[data.eval]]\npth = "a"\n', "6: unknown key 'data.eval[0].pth'; did you mean 'path'?"),
        ('[[data.eval]]\npath = " "\n', "6: data.eval[0].path is empty: name a file, a folder, a glob or hub:NAME"),
        ("[train]\nepochs = 2\nwarmup = 2\n", "7: train.warmup is 2.0: write a share of all steps, 0 to below 1"),
    ],
)
def test_a_wrong_element_names_line_and_place(written: Callable[[str], Path], text: str, said: str) -> None:
    path = written(MINIMAL + text)
    assert refusal(path) == f"{path}:{said}"


@pytest.mark.parametrize("override", ["train.lr=fast", "train.lr=-1", 'data.train=[{pth="x"}]'])
def test_a_wrong_override_is_not_laid_at_the_files_door(written: Callable[[str], Path], override: str) -> None:
    path = written(MINIMAL + "[train]\nlr = 1e-3\n")
    assert refusal(path, override).startswith((f"{path}: train.lr", f"{path}: unknown key 'data.train[0].pth'"))


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("[train]\nanchors = 8\n[drafter]\nanchors = 8\n", 8),  # right in one section, unknown in another
        ("[drafter]\nlayers = 2 # two\n[eval]\nlayers = 2\n", 8),
    ],
)
def test_the_line_is_that_of_the_right_section(written: Callable[[str], Path], text: str, line: int) -> None:
    path = written(MINIMAL + text)
    assert refusal(path).startswith(f"{path}:{line}: ")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "missing required field `target`"),
        ('[target]\nmodel = "m"\n', "missing required field `data`"),
        ("target = 5\n" + MINIMAL.replace("[target]\nmodel", "# model"), "[target] is a section, not a value"),
        (MINIMAL.replace("path", "pth"), ":4: unknown key 'data.train[0].pth'; did you mean 'path'?"),
        (MINIMAL.replace("chats.jsonl", " "), "data.train[0].path is empty"),
        (MINIMAL + "[train]\nlr = nan\n", "train.lr is nan"),
        (MINIMAL + "[drafter]\nblock_size = 1\n", "drafter.block_size is 1"),
    ],
)
def test_other_refusals_name_the_file_and_the_key(written: Callable[[str], Path], text: str, said: str) -> None:
    path = written(text)
    answer = refusal(path)
    assert answer.startswith(f"{path}")
    assert said in answer


# --- --set -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("override", "section", "key", "value"),
    [
        ("train.lr=1e-3", "train", "lr", 1e-3),
        ("train.lr = 1e-3", "train", "lr", 1e-3),
        ("train.epochs=2", "train", "epochs", 2),
        ("run.name=second", "run", "name", "second"),
        ('run.name="third one"', "run", "name", "third one"),
        ("run.name=a=b", "run", "name", "a=b"),
        ("run.dir=/tmp/x y", "run", "dir", "/tmp/x y"),
        ("drafter.taps=[1, 2]", "drafter", "taps", (1, 2)),
        ("drafter.taps=auto", "drafter", "taps", "auto"),
        ("data.strict=true", "data", "strict", True),
        ("ring.bytes=64MiB", "ring", "bytes", "64MiB"),
        ("gpus.split=2:1", "gpus", "split", "2:1"),
    ],
)
def test_set_overrides_one_key(
    written: Callable[[str], Path], override: str, section: str, key: str, value: object
) -> None:
    config = load_config(written(MINIMAL), [override])
    assert getattr(getattr(config, section), key) == value


def test_set_is_repeatable_and_the_last_one_wins(written: Callable[[str], Path]) -> None:
    config = load_config(written(EVERYTHING), ["train.lr=1", "train.epochs=9", "train.lr=2"])
    assert (config.train.lr, config.train.epochs, config.train.seed) == (2, 9, 9)


def test_set_can_make_a_list_of_sources(written: Callable[[str], Path], tmp_path: Path) -> None:
    config = load_config(written(MINIMAL), ['data.train=[{path="x.jsonl"}, {path="y.jsonl"}]'])
    assert [source.path for source in config.data.train] == [str(tmp_path / name) for name in ("x.jsonl", "y.jsonl")]


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("train.lr", "--set train.lr: write it as section.key=value"),
        ("=5", "write it as section.key=value"),
        ("train.=5", "write it as section.key=value"),
        ("train..lr=5", "write it as section.key=value"),
        ("target.model.name=5", "model is not a section"),
        ("train.leraning=5", "unknown key 'train.leraning'"),
        ("trian.lr=5", "unknown key 'trian'; did you mean 'train'?"),
        ("train=5", "[train] is a section, not a value"),
        ("train.lr=fast", "train.lr: Expected `float`, got `str`"),
    ],
)
def test_a_wrong_set_is_refused(written: Callable[[str], Path], override: str, said: str) -> None:
    assert said in refusal(written(MINIMAL), override)


# --- paths -----------------------------------------------------------------------------------------------------------


def test_relative_paths_are_taken_from_the_config_file(
    written: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = tmp_path / "elsewhere"
    for name in ("model", "published", "elsewhere", "elsewhere/model"):
        (tmp_path / name).mkdir()
    for folder in (tmp_path, elsewhere):
        for name in ("a.jsonl", "b.jsonl", "c.jsonl"):
            (folder / name).touch()
    path = written(EVERYTHING.replace("org/model", "model"))
    monkeypatch.chdir(elsewhere)
    config = load_config(Path("..") / path.name)
    assert config.target.model == str(tmp_path / "model")
    assert [source.path for source in config.data.train] == [str(tmp_path / name) for name in ("a.jsonl", "b.jsonl")]
    assert [source.path for source in config.data.eval] == [str(tmp_path / "c.jsonl")]
    assert config.drafter.init_from == str(tmp_path / "published")


def test_a_hub_id_and_an_absolute_path_stay_as_they_are(written: Callable[[str], Path], tmp_path: Path) -> None:
    (tmp_path / "far").mkdir()
    (tmp_path / "far" / "a.jsonl").touch()
    config = load_config(written(EVERYTHING.replace("a.jsonl", f"{tmp_path}/far/a.jsonl")))
    assert config.target.model == "org/model"
    assert config.data.train[0].path == f"{tmp_path}/far/a.jsonl"


def test_the_word_embedded_is_never_a_folder(written: Callable[[str], Path], tmp_path: Path) -> None:
    (tmp_path / "embedded").mkdir()
    assert load_config(written(MINIMAL)).target.model == "embedded"


def test_a_data_file_is_never_taken_from_the_working_folder(
    written: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "chats.jsonl").touch()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert load_config(written(MINIMAL)).data.train[0].path == str(tmp_path / "chats.jsonl")


def test_a_drafter_to_start_from_is_never_taken_from_the_working_folder(
    written: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elsewhere" / "published").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert load_config(written(EVERYTHING)).drafter.init_from == str(tmp_path / "published")


def test_a_file_beside_the_config_is_no_target_folder(written: Callable[[str], Path], tmp_path: Path) -> None:
    (tmp_path / "org").mkdir()
    (tmp_path / "org" / "model").touch()
    assert load_config(written(EVERYTHING)).target.model == "org/model"


def test_a_drafter_to_start_from_is_a_folder_here_or_a_hub_id(written: Callable[[str], Path], tmp_path: Path) -> None:
    text = EVERYTHING.replace('init_from = "published"', 'init_from = "lab/drafter"')
    assert load_config(written(text)).drafter.init_from == "lab/drafter"
    (tmp_path / "lab/drafter").mkdir(parents=True)
    assert load_config(written(text)).drafter.init_from == str(tmp_path / "lab/drafter")
    for name in ("./lab/drafter", "a/b/c"):
        other = EVERYTHING.replace('init_from = "published"', f'init_from = "{name}"')
        assert load_config(written(other)).drafter.init_from == str(tmp_path / name)

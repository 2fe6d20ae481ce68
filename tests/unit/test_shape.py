"""Shape resolution, its refusals, and z-lab's config.json in both layouts."""

import subprocess
import sys
from typing import Any

import pytest

from consumer.config import DrafterConfig, EvalConfig, TrainConfig, check
from consumer.shape import DrafterShape, auto_taps, resolve_shape
from consumer.zlab import config_json, shape_from_config_json, tensor_shapes
from protocol.errors import RequestError

TARGET: dict[str, Any] = {
    "hidden_size": 64,
    "num_layers": 12,
    "vocab_size": 100,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 5e5,
    "partial_rotary_factor": 0.25,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": [2, 3],
    "pad_token_id": 2,
    "input_embedding_scale": 1.0,
}


def resolve(**keys: Any) -> DrafterShape:
    return resolve_shape(DrafterConfig(**keys), TARGET, range(90, 100))


@pytest.mark.parametrize(
    ("layers", "n", "ids"),
    [
        (64, 5, (1, 16, 31, 46, 61)),
        (36, 5, (1, 9, 17, 25, 33)),
        (40, 5, (1, 10, 19, 28, 37)),
        (32, 5, (1, 8, 15, 22, 29)),
        (28, 5, (1, 7, 13, 19, 25)),
        (48, 5, (1, 12, 23, 34, 45)),
        (64, 8, (1, 10, 18, 27, 35, 44, 52, 61)),
        (36, 1, (18,)),
    ],
)
def test_auto_taps_follow_the_published_table(layers: int, n: int, ids: tuple[int, ...]) -> None:
    assert auto_taps(layers, n) == ids


def test_auto_taps_are_distinct_or_refused() -> None:
    for layers in range(1, 80):
        for n in range(1, 9):
            if n == 1 or n <= layers - 3:
                taps = auto_taps(layers, n)
                assert len(set(taps)) == n
                assert 0 <= min(taps) <= max(taps) < layers
            else:
                with pytest.raises(RequestError, match=f"0 to {layers - 1}"):
                    auto_taps(layers, n)


def test_everything_left_out_comes_from_the_target() -> None:
    shape = resolve()
    assert (shape.num_heads, shape.num_kv_heads, shape.head_dim, shape.intermediate_size) == (4, 2, 16, 128)
    assert (shape.rope_theta, shape.rms_norm_eps, shape.num_target_layers) == (5e5, 1e-5, 12)
    assert shape.target_layer_ids == auto_taps(12, 5)
    assert shape.layer_types == ("full_attention",) * 5
    assert shape.mask_token_id == 90
    assert resolve_shape(DrafterConfig(), {**TARGET, "num_layers": 4}, [90]).target_layer_ids == (2,)


@pytest.mark.parametrize("taps", [(12,), (-1, 3), (1, 1), ()])
def test_wrong_taps_name_the_valid_range(taps: tuple[int, ...]) -> None:
    with pytest.raises(RequestError, match=r"drafter\.taps.* 0 to 11"):
        resolve(taps=taps)


@pytest.mark.parametrize("token", [100, -1, 1, 2, 3, 50])
def test_a_mask_token_outside_special_or_in_the_data_is_refused(token: int) -> None:
    """N5: never pad, end or start, a row that nobody ships, or a token that means something."""
    with pytest.raises(RequestError, match=rf"drafter\.mask_token is {token}"):
        resolve(mask_token=token)


def test_mask_token_auto_takes_the_first_free_id_and_refuses_when_none_is() -> None:
    """N5: a spare id; none is left; a number that says what it is."""
    assert resolve_shape(DrafterConfig(), TARGET, [100, 2, 97, 95]).mask_token_id == 97
    assert resolve(mask_token=95).mask_token_id == 95
    with pytest.raises(RequestError, match=r"drafter\.mask_token"):
        resolve_shape(DrafterConfig(), TARGET, [2, 3, 1, 100])
    with pytest.raises(RequestError, match=r"drafter\.mask_token is 3, the target's pad, end or start token"):
        resolve_shape(DrafterConfig(mask_token=3), TARGET, range(100))


@pytest.mark.parametrize(("keys", "field"), [({"heads": 3}, "kv_heads"), ({"head_dim": 15}, "head_dim")])
def test_impossible_heads_are_refused(keys: dict[str, int], field: str) -> None:
    with pytest.raises(RequestError, match=rf"drafter\.{field}"):
        resolve(**keys)


def test_config_json_writes_rope_in_both_places_and_never_a_partial_rotation() -> None:
    config = config_json(resolve())
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"] == 5e5
    assert "partial_rotary_factor" not in {*config, *config["rope_parameters"]}
    assert config["block_size"] == config["dflash_config"]["block_size"] == 16
    assert config["eos_token_id"] == [2, 3]


SLIDING = {"layer_types": ("sliding_attention", "full_attention"), "sliding_window": 7, "layers": 2}


@pytest.mark.parametrize("keys", [{}, SLIDING])
def test_config_json_round_trips_in_both_layouts(keys: dict[str, Any]) -> None:
    shape = resolve(**keys)
    config = config_json(shape)
    assert shape_from_config_json(config) == shape
    nested = {k: v for k, v in config.items() if k not in {"rope_theta", "rope_scaling", "block_size"}}
    assert shape_from_config_json(nested) == shape
    flat = {k: v for k, v in config.items() if k not in {"rope_parameters", "dflash_config"}} | config["dflash_config"]
    assert shape_from_config_json(flat) == shape


def test_causality_rule() -> None:
    shape = resolve(**SLIDING)
    assert [shape.causal(0), shape.causal(1)] == [True, False]
    assert [shape.window(0), shape.window(1)] == [7, None]
    both = shape_from_config_json({**config_json(shape), "is_causal": False})
    assert [both.causal(0), both.causal(1)] == [False, False]
    assert config_json(both)["is_causal"] is False


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"architectures": ["DFlash2DraftModel"]}, "DFlash2DraftModel"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1.0}}, "rope_parameters"),
        ({"num_target_layers": None}, "num_target_layers"),
        ({"rope_parameters": None, "rope_theta": None}, "rope_theta"),
    ],
)
def test_config_json_of_something_else_is_refused_by_name(change: dict[str, Any], name: str) -> None:
    with pytest.raises(RequestError, match=name):
        shape_from_config_json({**config_json(resolve()), **change})


def test_tensor_table_of_a_published_drafter() -> None:
    target = {
        **TARGET,
        "hidden_size": 5120,
        "num_layers": 64,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 17408,
    }
    table = tensor_shapes(resolve_shape(DrafterConfig(), target, [90]))
    assert len(table) == 58
    assert sum(a * (b[0] if b else 1) for a, *b in table.values()) == 1_730_213_120


@pytest.mark.parametrize(
    ("section", "field", "value"),
    [
        ("drafter", "layers", 0),
        ("drafter", "block_size", 1),
        ("drafter", "rope_theta", -1.0),
        ("drafter", "sliding_window", 8),
        ("drafter", "layer_types", ("full_attention",)),
        ("drafter", "layer_types", ("full",) * 5),
        ("drafter", "layer_types", ("sliding_attention",) * 5),
        ("train", "lr", 0.0),
        ("train", "lr", float("nan")),
        ("train", "lr", float("inf")),
        ("train", "warmup", 1.0),
        ("train", "anchors", 0),
        ("train", "microbatch_tokens", 0),
        ("train", "gamma", 0.0),
        ("train", "weight_decay", -0.1),
        ("train", "seed", -1),
        ("train", "max_steps", 0),
        ("eval", "every", -1),
        ("eval", "prompts", 0),
        ("eval", "max_new_tokens", 1),
    ],
)
def test_a_value_that_no_target_makes_right_is_refused_by_name(section: str, field: str, value: Any) -> None:
    sections = {"drafter": DrafterConfig, "train": TrainConfig, "eval": EvalConfig}
    built = [kind(**({field: value} if name == section else {})) for name, kind in sections.items()]
    with pytest.raises(RequestError, match=rf"{section}\.{field}"):
        check(*built)


def test_the_defaults_pass_and_gamma_without_effect_is_refused() -> None:
    check(DrafterConfig(), TrainConfig(), EvalConfig())
    with pytest.raises(RequestError, match=r"train\.gamma"):
        check(DrafterConfig(), TrainConfig(loss="dpace", gamma=3.0), EvalConfig())


def test_configuration_and_shape_do_not_import_torch() -> None:
    code = "import sys, consumer.config, consumer.shape, consumer.zlab; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0


@pytest.mark.parametrize("same", [{}, {"heads": 4, "kv_heads": 2, "head_dim": 16, "mlp": 128}])
def test_target_sizes_may_start_from_the_target(same: dict[str, Any]) -> None:
    assert resolve(init="target", **same) == resolve()


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({"heads": 8}, "drafter.heads is 8, the target's 4"),
        ({"kv_heads": 4}, "drafter.kv_heads is 4, the target's 2"),
        ({"head_dim": 32}, "drafter.head_dim is 32, the target's 16"),
        ({"mlp": 96, "heads": 2}, "drafter.heads is 2, the target's 4; drafter.mlp is 96, the target's 128"),
        ({"layers": 13}, "drafter.layers is 13, more than the 12 layers"),
    ],
)
def test_other_sizes_cannot_start_from_the_target(other: dict[str, Any], said: str) -> None:
    resolve(**other)
    with pytest.raises(RequestError, match=said):
        resolve(init="target", **other)


def test_a_drafter_starts_from_one_thing() -> None:
    both = DrafterConfig(init="target", init_from="export")
    with pytest.raises(RequestError, match=r"drafter\.init = .* and drafter\.init_from"):
        check(both, TrainConfig(), EvalConfig())

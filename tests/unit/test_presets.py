"""Known models, and models described by a Hugging Face configuration."""

import json
from pathlib import Path
from typing import Any

import pytest

from fasim import presets
from fasim.errors import UsageError
from fasim.problem import Problem

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 4096,
    "max_position_embeddings": 8192,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "torch_dtype": "bfloat16",
}


def read(**config: Any) -> Problem:
    return Problem(**presets.from_config(config).options)


@pytest.mark.parametrize("name", presets.PRESETS)
def test_every_preset_is_a_problem(name: str) -> None:
    Problem(**presets.load(name).options)


def test_the_presets_are_the_models() -> None:
    shapes = {
        name: (p.heads, p.kv_heads, p.seq, p.head_dim, p.dtype, p.reach)
        for name in presets.PRESETS
        for p in [Problem(**presets.load(name).options)]
    }
    assert shapes == {
        "gpt2-medium": (16, 16, 1024, 64, "fp16", (-1, 0)),
        "llama-3-8b": (32, 8, 8192, 128, "bf16", (-1, 0)),
        "mistral-7b": (32, 8, 32768, 128, "bf16", (4095, 0)),
        "sd-1.5": (8, 8, 4096, 40, "fp16", (-1, -1)),
        "sd-1.5-mid": (8, 8, 1024, 80, "fp16", (-1, -1)),
        "sd-1.5-deep": (8, 8, 256, 160, "fp16", (-1, -1)),
    }


def test_a_configuration_gives_the_same_as_the_preset() -> None:
    assert read(**LLAMA) == Problem(**presets.load("llama-3-8b").options)


def test_a_derived_head_dim_is_said() -> None:
    notes = presets.from_config(LLAMA).notes
    assert len(notes) == 1
    assert "128 = 4096 / 32" in notes[0]


@pytest.mark.parametrize(("hidden", "head_dim"), [(1024, 128), (3072, 256)])
def test_head_dim_is_read_where_it_is_given(hidden: int, head_dim: int) -> None:
    """Qwen3-0.6B has 16 heads of 128 in a hidden size of 1024; Gemma-7B 16 of 256 in 3072."""
    preset = presets.from_config(
        {"num_attention_heads": 16, "hidden_size": hidden, "head_dim": head_dim}
    )
    assert preset.options["head_dim"] == head_dim
    assert not preset.notes


def test_a_window_of_w_keys_includes_the_aligned_one() -> None:
    assert read(**LLAMA, sliding_window=4096).window == (4095, 0)
    assert read(**LLAMA, sliding_window=None).window == (-1, -1)
    assert read(**LLAMA, sliding_window=4096, use_sliding_window=False).window == (-1, -1)


def test_layers_without_the_window_are_said() -> None:
    layers = {"sliding_window": 1024, "layer_types": ["sliding_attention", "full_attention"]}
    assert any("not every layer" in note for note in presets.from_config(LLAMA | layers).notes)


def test_gemma_has_a_softcap_and_its_own_scale() -> None:
    problem = read(**LLAMA, attn_logit_softcapping=50.0, query_pre_attn_scalar=168)
    assert problem.softcap == 50.0
    assert problem.scale == pytest.approx(0.07715, abs=1e-5)


def test_falcon_is_multi_query_whatever_num_kv_heads_says() -> None:
    problem = read(num_attention_heads=71, hidden_size=4544, multi_query=True, num_kv_heads=71)
    assert (problem.heads, problem.kv_heads, problem.head_dim) == (71, 1, 64)


def test_gpt2_names_its_sizes_differently() -> None:
    problem = read(n_head=16, n_embd=1024, n_positions=1024, architectures=["GPT2LMHeadModel"])
    assert (problem.heads, problem.seq, problem.head_dim, problem.causal) == (16, 1024, 64, True)


def test_latent_attention_has_two_head_dims() -> None:
    problem = read(
        num_attention_heads=128, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128
    )
    assert (problem.head_dim, problem.head_dim_v) == (192, 128)


def test_a_text_model_inside_another_is_found() -> None:
    assert read(text_config=LLAMA, vision_config={}) == read(**LLAMA)


def test_an_encoder_is_not_causal_and_that_is_said() -> None:
    preset = presets.from_config(LLAMA | {"architectures": ["BertForMaskedLM"]})
    assert preset.options["causal"] is False
    assert any("not causal" in note for note in preset.notes)


def test_a_file_is_read_from_disk(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA))
    assert presets.load(str(path)).options["kv_heads"] == 8


@pytest.mark.parametrize(
    "change",
    [
        {"num_attention_heads": None},
        {"num_attention_heads": "32"},
        {"num_attention_heads": True},
        {"num_attention_heads": 0},
        {"num_attention_heads": 33},
        {"hidden_size": None},
        {"torch_dtype": "int4"},
        {"torch_dtype": ["bfloat16"]},
        {"attn_logit_softcapping": "on"},
        {"query_pre_attn_scalar": -1},
        {"query_pre_attn_scalar": [1]},
        {"architectures": 3},
        {"layer_types": 3, "sliding_window": 5},
        {"text_config": 3},
    ],
)
def test_a_configuration_that_makes_no_sense_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(UsageError) as failure:
        presets.from_config(LLAMA | change, where="config.json")
    assert failure.value.where == "config.json"
    assert failure.value.hint


def test_an_unknown_model_gets_a_suggestion() -> None:
    with pytest.raises(UsageError) as failure:
        presets.load("llama3-8b")
    assert "llama-3-8b" in failure.value.hint

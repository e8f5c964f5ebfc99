"""What "auto" means on which machine."""

import pytest
import torch

from vapo.config import Config
from vapo.models import auto
from vapo.models.auto import resolve_auto

BOTH = {"flash_attn", "vllm"}


@pytest.mark.parametrize(
    ("device", "installed", "has_bfloat16", "given", "expected"),
    [
        ("cpu", BOTH, True, {}, ("float32", "sdpa", "loop")),
        ("cuda", set(), True, {}, ("bfloat16", "sdpa", "transformers")),
        ("cuda", BOTH, True, {}, ("bfloat16", "flash_attention_2", "vllm")),
        ("cuda", BOTH, False, {}, ("float32", "sdpa", "vllm")),
        ("cuda", BOTH, True, {"dtype": "float32"}, ("float32", "sdpa", "vllm")),
        ("cuda", {"vllm"}, False, {"attention": "flash_attention_2"}, ("bfloat16", "flash_attention_2", "vllm")),
        ("cuda", BOTH, True, {"engine": "loop", "attention": "eager"}, ("bfloat16", "eager", "loop")),
    ],
)
def test_what_is_auto_fits_the_machine_and_what_is_given_stays(
    device, installed, has_bfloat16, given, expected, monkeypatch
):
    monkeypatch.setattr(auto, "find_spec", lambda name: name in installed or None)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: has_bfloat16)
    config, reasons = resolve_auto(Config(**given), torch.device(device))
    assert (config.dtype, config.attention, config.engine) == expected
    assert reasons.keys() == {"dtype", "attention", "engine"} - given.keys()
    assert resolve_auto(config, torch.device(device)) == (config, {})

"""Which stored tensors of a multimodal checkpoint are not loaded: those of its other modalities, and what the model
class leaves out by itself.

`load_target` asks for a causal language model first. For some architectures that is the text model alone, for others
the whole multimodal one, and what has no causal language model is loaded whole: transformers' own table says which.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from producer.locate import read_whole_config

# Components of tensor names that belong to another modality wherever they occur.
_TOWERS = frozenset(
    {
        *("visual", "vision_tower", "vision_model", "vision_encoder", "vision_embedder", "vision_adapter"),
        *("embed_vision", "image_newline", "multi_modal_projector"),
        *("audio_tower", "audio_model", "audio_encoder", "embed_audio"),
    }
)


def left_out(folder: Path) -> Callable[[str], bool]:
    """Tells by its name whether a stored tensor is left out when `load_target` loads `folder`. In doubt it is not."""
    config = read_whole_config(folder)
    nested = any(isinstance(config.get(key), dict) for key in ("text_config", "language_config"))
    if not nested or "auto_map" in config:
        return lambda name: False
    # Only multimodal targets pay for this import, which takes seconds.
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    class_name = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(str(config.get("model_type")))
    if not isinstance(class_name, str) or class_name.endswith("ForConditionalGeneration"):
        return lambda name: False
    patterns = getattr(getattr(transformers, class_name), "_keys_to_ignore_on_load_unexpected", None) or []
    ignored = [re.compile(pattern) for pattern in patterns]
    return lambda name: bool(_TOWERS & set(name.split("."))) or any(found.search(name) for found in ignored)

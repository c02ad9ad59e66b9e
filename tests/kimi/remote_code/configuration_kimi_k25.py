"""The checkpoint's own configuration class, as `auto_map` in config.json names it."""

from typing import ClassVar

from transformers import DeepseekV3Config, PretrainedConfig


class KimiK25VisionConfig(PretrainedConfig):
    """The vision tower's and the projector's sizes, under the names of config.json."""

    model_type = "kimi_k25_vision"


class KimiK25Config(PretrainedConfig):
    """A DeepSeek-V3 text model and a vision tower."""

    model_type = "kimi_k25"
    sub_configs: ClassVar = {"text_config": DeepseekV3Config, "vision_config": KimiK25VisionConfig}

    def __init__(self, text_config=None, vision_config=None, media_placeholder_token_id=0, **kwargs):
        text_config = text_config or {}
        self.text_config = DeepseekV3Config(**text_config) if isinstance(text_config, dict) else text_config
        vision_config = vision_config or {}
        self.vision_config = KimiK25VisionConfig(**vision_config) if isinstance(vision_config, dict) else vision_config
        self.media_placeholder_token_id = media_placeholder_token_id
        quantization = getattr(self.text_config, "quantization_config", None)
        if quantization is not None:
            self.quantization_config = quantization
        super().__init__(**kwargs)

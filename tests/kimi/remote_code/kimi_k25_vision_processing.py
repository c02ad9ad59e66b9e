"""The checkpoint's image processor, as `auto_map` names it. The miniature answers text only."""

from transformers.image_processing_utils import BaseImageProcessor


class KimiK25VisionProcessor(BaseImageProcessor):
    """Holds what preprocessor_config.json says of images; engines read it from here."""

    def __init__(self, media_proc_cfg=None, **kwargs):
        super().__init__(**kwargs)
        self.media_proc_cfg = media_proc_cfg or {}

    def preprocess(self, *_args, **_kwargs):
        """Images are not what this checkpoint is for."""
        raise NotImplementedError("the miniature of Kimi-K2.5 answers text only")

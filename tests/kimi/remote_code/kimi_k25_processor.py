"""The checkpoint's processor, as `auto_map` names it: its tokenizer, and its image processor."""

from typing import ClassVar

from transformers.processing_utils import ProcessorMixin


class KimiK25Processor(ProcessorMixin):
    """Text goes to the tokenizer; engines prepare images themselves."""

    attributes: ClassVar = ["image_processor", "tokenizer"]
    image_processor_class = "AutoImageProcessor"
    tokenizer_class = "AutoTokenizer"

    def __init__(self, image_processor=None, tokenizer=None, chat_template=None, **kwargs):
        super().__init__(image_processor, tokenizer, chat_template=chat_template)
        self.media_processor = image_processor

    def __call__(self, text=None, **kwargs):
        """Tokenize `text`."""
        return self.tokenizer(text, **kwargs)

"""The checkpoint's processor, as `auto_map` names it: its tokenizer, and its image processor."""

from transformers.processing_utils import ProcessorMixin


class KimiK25Processor(ProcessorMixin):
    """Text goes to the tokenizer, images to the image processor."""

    def __init__(self, image_processor=None, tokenizer=None, chat_template=None, **kwargs):
        super().__init__(image_processor, tokenizer, chat_template=chat_template)
        self.media_processor = image_processor

    def __call__(self, text=None, medias=None, return_tensors="pt", **kwargs):
        """Token ids of `text`, and the patches of `medias` beside them."""
        known = {key: value for key, value in kwargs.items() if key in ("padding", "add_special_tokens")}
        made = dict(self.tokenizer(text, return_tensors=return_tensors, **known))
        return {**made, **(self.media_processor.preprocess(medias) if medias else {})}

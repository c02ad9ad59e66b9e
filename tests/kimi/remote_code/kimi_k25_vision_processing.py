"""The checkpoint's image processor, as `auto_map` names it: images to patches, still images only."""

import numpy as np
import torch
from PIL import Image
from transformers.image_processing_utils import BaseImageProcessor


class KimiK25VisionProcessor(BaseImageProcessor):
    """Scales an image down to the patches allowed, pads it to whole merges, cuts it into patches.

    What preprocessor_config.json says of images is kept as `media_proc_cfg`; engines read it from there.
    """

    def __init__(self, media_proc_cfg=None, **kwargs):
        super().__init__(**kwargs)
        self.media_proc_cfg = media_proc_cfg or {}

    def media_tokens_calculator(self, media):
        """Placeholder tokens that an image takes in the text."""
        rows, columns, _ = self._grid(_as_image(media["image"]))
        return rows * columns // self.media_proc_cfg["merge_kernel_size"] ** 2

    def preprocess(self, medias, **_kwargs):
        """Patches of all images `[patches, 3, size, size]`, and each one's grid (time, rows, columns)."""
        patches, grids = [], []
        for media in medias:
            image = _as_image(media["image"])
            rows, columns, scaled = self._grid(image)
            patches.append(self._patches(image.resize(scaled), rows, columns))
            grids.append([1, rows, columns])
        return {"pixel_values": torch.cat(patches), "grid_thws": torch.tensor(grids)}

    def _grid(self, image):
        """Rows and columns of patches, padding included, and the size in pixels before it."""
        cfg = self.media_proc_cfg
        size, merge = cfg["patch_size"], cfg["merge_kernel_size"]
        limit = cfg["patch_limit_on_one_side"] * size
        factor = min(1.0, limit / max(image.size))
        scaled = tuple(max(1, int(side * factor)) for side in image.size)
        columns, rows = (-(-side // (size * merge)) * merge for side in scaled)
        return rows, columns, scaled

    def _patches(self, image, rows, columns):
        size = self.media_proc_cfg["patch_size"]
        pixels = torch.zeros(3, rows * size, columns * size)
        values = torch.from_numpy(np.asarray(image, dtype=np.float32) / 255.0).permute(2, 0, 1)
        mean, std = (torch.tensor(self.media_proc_cfg[f"image_{name}"]).view(3, 1, 1) for name in ("mean", "std"))
        pixels[:, : values.shape[1], : values.shape[2]] = (values - mean) / std
        return pixels.view(3, rows, size, columns, size).permute(1, 3, 0, 2, 4).reshape(-1, 3, size, size)


def _as_image(image):
    return image.convert("RGB") if isinstance(image, Image.Image) else Image.fromarray(np.asarray(image)).convert("RGB")

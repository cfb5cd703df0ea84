"""A small vision-language model of random numbers, with the demo model's tokenizer; most others want torchvision."""

import base64
import io
import random
from pathlib import Path

from PIL import Image

from specdec.model import demo_model

# A text model whose answers hang on all of their input; that repeats itself would say little.
_TEXT = {
    **{"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "head_dim": 32, "num_attention_heads": 2},
    **{"num_key_value_heads": 1, "max_position_embeddings": 1024, "initializer_range": 0.2},
    **{"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2},
}
_VISION = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}


def make_paddleocr_vl(folder: Path) -> None:
    """An image has as many tokens as its size asks for, their positions by row and column (M-RoPE); text is Ernie's."""
    import torch
    from transformers import AutoTokenizer, PaddleOCRVLConfig, PaddleOCRVLForConditionalGeneration, PaddleOCRVLProcessor
    from transformers.models.paddleocr_vl.image_processing_pil_paddleocr_vl import PaddleOCRVLImageProcessorPil

    image, start, end = tokens = ["<|IMAGE_PLACEHOLDER|>", "<|IMAGE_START|>", "<|IMAGE_END|>"]
    tokenizer = AutoTokenizer.from_pretrained(demo_model(), extra_special_tokens={"image_token": image})
    tokenizer.add_special_tokens({"additional_special_tokens": tokens[1:]}, replace_extra_special_tokens=False)
    ids = tokenizer.get_vocab()
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]}
    config = PaddleOCRVLConfig(
        vision_config={**_VISION, "image_size": 56, "patch_size": 14},
        text_config={**_TEXT, "vocab_size": len(tokenizer), "rope_parameters": rope, "tie_word_embeddings": False},
        image_token_id=ids[image],
        video_token_id=len(tokenizer) - 1,
        vision_start_token_id=ids[start],
        vision_end_token_id=ids[end],
        tie_word_embeddings=False,
    )
    pixels = {"shortest_edge": 28 * 28 * 4, "longest_edge": 28 * 28 * 64}
    images = PaddleOCRVLImageProcessorPil(size=pixels)
    torch.manual_seed(1)
    PaddleOCRVLForConditionalGeneration(config).save_pretrained(folder)
    PaddleOCRVLProcessor(images, tokenizer, chat_template=tokenizer.chat_template).save_pretrained(folder)


def picture(seed: int, width: int = 224, height: int = 224) -> str:
    """A data URL of coloured squares."""
    dice = random.Random(seed)
    squares = Image.new("RGB", (8, 8))
    squares.putdata([(dice.randrange(256), dice.randrange(256), dice.randrange(256)) for _ in range(64)])
    file = io.BytesIO()
    squares.resize((width, height), Image.Resampling.NEAREST).save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()

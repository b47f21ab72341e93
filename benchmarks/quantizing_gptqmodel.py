"""What `benchmarks.quantizing` runs in an environment with gptqmodel: IDS MODEL OUTPUT FIELDS."""

from __future__ import annotations

import json
import os
import sys

# Its own choice on a machine of two cores is one, which it then refuses.
os.environ.setdefault("GPTQMODEL_CPU_WORKERS", "2")


def main() -> None:
    import torch
    from gptqmodel import GPTQModel, QuantizeConfig
    from safetensors.torch import load_file

    ids, source, out, fields = sys.argv[1:]
    config = QuantizeConfig(**json.loads(fields), device="cpu", offload_to_disk=False)
    model = GPTQModel.load(source, config, dtype=torch.float32)
    rows = load_file(ids)["calibration"].tolist()
    model.quantize([{"input_ids": row, "attention_mask": [1] * len(row)} for row in rows], batch_size=1)
    model.save(out)


if __name__ == "__main__":
    main()

"""Train two real steps on virtual devices and dump every program: ``real_step.py REQUEST FOLDER``."""

import os
import pickle
import sys
from pathlib import Path

if __name__ == "__main__":
    request_file, folder = sys.argv[1:]
    os.environ["XLA_FLAGS"] = (
        f"--xla_dump_to={folder} --xla_dump_hlo_as_text --xla_dump_hlo_as_proto --xla_dump_hlo_pass_re=^$"
    )
    request = pickle.loads(Path(request_file).read_bytes())

    import torch

    from trl_tpu.modeling.head_spec import HeadSpec
    from trl_tpu.plan.trace import make_trainer

    outputs = HeadSpec.of(request.model)
    request.model.num_labels = len(outputs.weights)
    model = outputs.auto_class.from_config(request.model, dtype=getattr(torch, request.dtype))
    make_trainer(request, model, folder).train()

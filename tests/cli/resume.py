"""A process without this package and without torchao: loads a checkpoint and goes on with it. Arguments: the file."""

import sys
from pathlib import Path


def main(path: str) -> None:
    sys.modules["lightning_fp8_rocm"] = sys.modules["torchao"] = None  # type: ignore[assignment]
    sys.path.insert(0, str(Path(__file__).parent))

    import lightning as L
    import torch
    from llama import Llama, tokens

    state = torch.load(path, weights_only=True)["state_dict"]
    assert state["model.lm_head.weight"].data_ptr() == state["model.model.embed_tokens.weight"].data_ptr()
    loaded = Llama.load_from_checkpoint(path, weights_only=True)
    assert all(torch.equal(value, state[name]) for name, value in loaded.state_dict().items())

    module = Llama(tied=True)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=3,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, tokens(8), ckpt_path=path, weights_only=True)
    print("losses", *module.losses)


if __name__ == "__main__":
    main(sys.argv[1])

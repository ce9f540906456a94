"""The Trainer of Hugging Face under each layout, if transformers and accelerate are installed: a callback attaches it.

Run it: pytest examples/cookbook/test_hugging_face.py
"""

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("accelerate", reason="accelerate is not installed")

VOCABULARY, LENGTH, BATCH, STEPS = 32, 8, 4, 2


class Attach(transformers.TrainerCallback):
    def __init__(self, layout):
        self.layout = layout

    def on_train_begin(self, args, state, control, model, **_):
        self.layout.attach(model)


def model_of():
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=LENGTH,
        )
    )


def samples():
    """Sequences of another length each, so that ranks have another number of tokens."""
    torch.manual_seed(0)
    for number in range(BATCH * STEPS):
        ids = torch.randint(VOCABULARY, (LENGTH,))
        yield {"input_ids": ids, "labels": torch.where(torch.arange(LENGTH) < LENGTH - number % 4, ids, -100)}


@pytest.mark.layouts("dp=2", "dp=4")
def test_trainer(layout, tmp_path):
    options = transformers.TrainingArguments(
        output_dir=str(tmp_path),
        max_steps=STEPS,
        per_device_train_batch_size=BATCH // layout.size("dp"),
        use_cpu=True,
        disable_tqdm=True,
        report_to=[],
        save_strategy="no",
    )
    trainer = transformers.Trainer(model_of(), options, train_dataset=list(samples()), callbacks=[Attach(layout)])
    trainer.train()

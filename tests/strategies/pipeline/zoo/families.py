"""Families of the `transformers` package, built from tiny configurations."""

from functools import partial

import torch

from tests.strategies.pipeline.zoo.chain import Zoo

SMALL = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "embedding_size", "word_embed_proj_dim"), 16),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "hidden_dim", "encoder_ffn_dim", "decoder_ffn_dim", "d_ff"), 24),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), 2),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 2),
    **dict.fromkeys(
        ("dropout", "attention_dropout", "hidden_dropout", "activation_dropout", "classifier_dropout"), 0.0
    ),
    **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop", "hidden_dropout_prob"), 0.0),
    **dict.fromkeys(("attention_probs_dropout_prob", "resid_dropout", "embed_dropout", "dropout_rate"), 0.0),
    **dict.fromkeys(("bos_token_id", "pad_token_id", "eos_token_id", "decoder_start_token_id"), 0),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx"), 32),
    "vocab_size": 40,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "rotary_dim": 4,
    "attn_implementation": "eager",
    "drop_path_rate": 0.0,
}


class Family(Zoo):
    """A model of one family with its loss."""

    def __init__(self, kind, auto, batch, **settings):
        import transformers

        super().__init__()
        config = transformers.AutoConfig.for_model(kind, **{**SMALL, **settings})
        self.model, self.batch = getattr(transformers, auto).from_config(config), batch

    def training_step(self, batch):
        return self.model(**batch).loss


def _words(size, generator, **more):
    tokens = torch.randint(2, 40, (size, 9), generator=generator)
    mask = torch.ones_like(tokens)
    mask[0, 6:] = 0
    return {"input_ids": tokens, "attention_mask": mask, "labels": tokens, **more}


def _masked_words(size, generator):
    batch = _words(size, generator)
    batch["labels"] = batch["labels"].masked_fill(torch.arange(9) % 2 == 0, -100)
    return batch


def _translation(size, generator):
    return {**_words(size, generator), "labels": torch.randint(2, 40, (size, 6), generator=generator)}


def _pictures(size, generator, *, side=16):
    pixels = torch.randn(size, 3, side, side, generator=generator)
    return {"pixel_values": pixels, "labels": torch.randint(0, 2, (size,), generator=generator)}


_text = partial(Family, auto="AutoModelForCausalLM", batch=_words)
_masked = partial(Family, auto="AutoModelForMaskedLM", batch=_masked_words)
_both = partial(Family, auto="AutoModelForSeq2SeqLM", batch=_translation)
_image = partial(Family, auto="AutoModelForImageClassification", batch=_pictures, image_size=16, patch_size=4)

FAMILIES = {
    **{
        kind: partial(_text, kind)
        for kind in (
            *("gpt_neox", "gptj", "opt", "bloom", "phi", "gpt_bigcode", "mistral", "qwen2", "qwen3", "gemma", "gemma2"),
            *("olmo", "olmo2", "starcoder2", "cohere", "phi3", "granite", "glm", "biogpt", "openai-gpt", "mamba"),
        )
    },
    **{
        kind: partial(_masked, kind)
        for kind in (
            *("distilbert", "roberta", "electra", "albert", "deberta", "deberta-v2", "mpnet", "modernbert", "roformer"),
            *("mobilebert", "squeezebert", "convbert", "nystromformer", "fnet", "esm", "yoso"),
        )
    },
    **{kind: partial(_both, kind) for kind in ("bart", "marian", "mbart", "pegasus", "blenderbot", "mt5")},
    **{kind: partial(_image, kind) for kind in ("beit", "dinov2", "dinov2_with_registers", "vit_msn", "ijepa")},
}

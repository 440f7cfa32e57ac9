"""Small models of the `transformers` package, built from their configurations and used as they come."""

import torch

from trainkit.task import TaskModule


class _Library(TaskModule):
    def __init__(self):
        super().__init__()
        import transformers  # which takes a second

        transformers.logging.set_verbosity_error()
        self.model = self.build(transformers)

    def training_step(self, batch):
        return self.model(**batch).loss

    def validation_step(self, batch):
        return {"loss": self.model(**batch).loss}

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


class Gpt2(_Library):
    @staticmethod
    def build(transformers):
        return transformers.GPT2LMHeadModel(
            transformers.GPT2Config(
                n_layer=4,
                n_embd=32,
                n_head=2,
                vocab_size=50,
                n_positions=16,
                resid_pdrop=0.0,
                embd_pdrop=0.0,
                attn_pdrop=0.0,
                bos_token_id=0,
                eos_token_id=0,
            )
        )

    @staticmethod
    def batch(size, generator):
        tokens = torch.randint(0, 50, (size, 12), generator=generator)
        return {"input_ids": tokens, "labels": tokens}


class Llama(_Library):
    @staticmethod
    def build(transformers):
        return transformers.LlamaForCausalLM(
            transformers.LlamaConfig(
                num_hidden_layers=4,
                hidden_size=32,
                intermediate_size=48,
                num_attention_heads=4,
                num_key_value_heads=2,
                vocab_size=50,
                max_position_embeddings=16,
                bos_token_id=0,
                eos_token_id=0,
                pad_token_id=0,
            )
        )

    @staticmethod
    def batch(size, generator):
        tokens = torch.randint(0, 50, (size, 12), generator=generator)
        mask = torch.ones_like(tokens)
        mask[0, 9:] = 0
        return {"input_ids": tokens, "labels": tokens, "attention_mask": mask}


class Bert(_Library):
    @staticmethod
    def build(transformers):
        return transformers.BertForMaskedLM(
            transformers.BertConfig(
                num_hidden_layers=4,
                hidden_size=32,
                intermediate_size=48,
                num_attention_heads=2,
                vocab_size=50,
                max_position_embeddings=16,
                hidden_dropout_prob=0.0,
                attention_probs_dropout_prob=0.0,
            )
        )

    @staticmethod
    def batch(size, generator):
        tokens = torch.randint(0, 50, (size, 12), generator=generator)
        labels = tokens.clone()
        labels[:, ::2] = -100
        mask = torch.ones_like(tokens)
        mask[0, 9:] = 0
        return {"input_ids": tokens, "labels": labels, "attention_mask": mask}


class Vit(_Library):
    @staticmethod
    def build(transformers):
        return transformers.ViTForImageClassification(
            transformers.ViTConfig(
                num_hidden_layers=4,
                hidden_size=32,
                intermediate_size=48,
                num_attention_heads=2,
                image_size=16,
                patch_size=8,
                num_labels=5,
                hidden_dropout_prob=0.0,
                attention_probs_dropout_prob=0.0,
            )
        )

    @staticmethod
    def batch(size, generator):
        return {
            "pixel_values": torch.randn(size, 3, 16, 16, generator=generator),
            "labels": torch.randint(0, 5, (size,), generator=generator),
        }


class T5(_Library):
    @staticmethod
    def build(transformers):
        return transformers.T5ForConditionalGeneration(
            transformers.T5Config(
                num_layers=2,
                d_model=32,
                d_kv=16,
                d_ff=48,
                num_heads=2,
                vocab_size=50,
                dropout_rate=0.0,
                decoder_start_token_id=0,
                pad_token_id=0,
                eos_token_id=1,
            )
        )

    @staticmethod
    def batch(size, generator):
        return {
            "input_ids": torch.randint(2, 50, (size, 10), generator=generator),
            "labels": torch.randint(2, 50, (size, 7), generator=generator),
        }


class Llava(_Library):
    """Takes the hidden states of its vision tower from forward hooks."""

    @staticmethod
    def build(transformers):
        vision = transformers.CLIPVisionConfig(
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=3,
            num_attention_heads=2,
            image_size=8,
            patch_size=4,
            projection_dim=32,
        )
        text = transformers.LlamaConfig(
            num_hidden_layers=2,
            hidden_size=32,
            intermediate_size=48,
            num_attention_heads=2,
            vocab_size=50,
            max_position_embeddings=16,
            bos_token_id=0,
            eos_token_id=0,
            pad_token_id=1,
        )
        config = transformers.LlavaConfig(
            vision_config=vision, text_config=text, image_token_index=49, vision_feature_layer=-2, image_seq_length=4
        )
        return transformers.LlavaForConditionalGeneration(config)

    @staticmethod
    def batch(size, generator):
        tokens = torch.randint(2, 48, (size, 10), generator=generator)
        tokens[:, 1:5] = 49  # the image
        return {
            "input_ids": tokens,
            "labels": tokens.masked_fill(tokens == 49, -100),
            "pixel_values": torch.randn(size, 3, 8, 8, generator=generator),
        }


class Mixtral(_Library):
    @staticmethod
    def build(transformers):
        return transformers.MixtralForCausalLM(
            transformers.MixtralConfig(
                num_hidden_layers=4,
                hidden_size=32,
                intermediate_size=48,
                num_attention_heads=4,
                num_key_value_heads=2,
                vocab_size=50,
                max_position_embeddings=16,
                num_local_experts=4,
                bos_token_id=0,
                eos_token_id=0,
                pad_token_id=0,
            )
        )

    batch = staticmethod(Gpt2.batch)


class LibraryResNet(_Library):
    @staticmethod
    def build(transformers):
        return transformers.ResNetForImageClassification(
            transformers.ResNetConfig(
                embedding_size=8, hidden_sizes=[8, 16], depths=[2, 2], layer_type="basic", num_labels=5
            )
        )

    @staticmethod
    def batch(size, generator):
        return {
            "pixel_values": torch.randn(size, 3, 16, 16, generator=generator),
            "labels": torch.randint(0, 5, (size,), generator=generator),
        }


LIBRARY = {model.__name__: model for model in (Gpt2, Bert, Llama, Vit, T5, Llava, Mixtral, LibraryResNet)}

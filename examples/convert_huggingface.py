"""Convert a Hugging Face transformer to structured layers, then train it.

The model is built from a config, with random weights: converted layers start fresh, so convert
before you train. Attention projections get structures aligned with their heads, the rest a block
tensor train; the output head and the embeddings stay as they are.

    pip install "einlinear[hf]"
    python examples/convert_huggingface.py
"""

import argparse

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import einlinear as el


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=80)
    args = parser.parse_args()

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=args.width,
        intermediate_size=4 * args.width,
        num_hidden_layers=args.layers,
        num_attention_heads=args.width // 32,
        num_key_value_heads=args.width // 64,
    )
    model = LlamaForCausalLM(config)

    rules = {"*.self_attn.*": el.heads(), "*.mlp.*": "btt(rank=2)"}  # the first match decides
    print(el.convert_(model, rules))
    el.init_(model)

    # Learning rates for every factor; lr is the best rate of the same model at width 64.
    optimizer = torch.optim.AdamW(el.param_groups(model, lr=1e-2, base_width=64))

    text = b"Structured layers are linear layers with fewer multiply-adds. " * 2
    tokens = torch.tensor([list(text)])
    for step in range(args.steps + 1):
        loss = model(input_ids=tokens, labels=tokens).loss
        if step % 20 == 0:
            print(f"step {step:3d}   loss {loss.item():.3f}")
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    written = model.generate(tokens[:, :20], max_new_tokens=30, do_sample=False, pad_token_id=0)
    print(bytes(written[0].tolist()).decode(errors="replace"))


if __name__ == "__main__":
    main()
